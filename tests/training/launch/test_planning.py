from contextlib import nullcontext

import pytest

from esmeray.cluster.placement import Workers
from esmeray.common.errors import ConfigError
from esmeray.dataset.store.conversion import ensure_store
from esmeray.dataset.store.reader import Store
from esmeray.tasks.plan import estimate_size, size_of_store, task_plan
from esmeray.training.config import Config
from esmeray.training.launch.planning import Plan, check_task, check_warm_up, make_plan
from tests.runs import tiny_config


def plan_of(config: Config, workers: int = 2) -> Plan:
    placed = Workers(workers, cpus_each=1, use_gpu=False)
    estimated = task_plan(config.data, config.model).estimate()
    return make_plan(config.batch, config.training, config.deepspeed, placed, estimated)


def test_estimate_is_near_what_the_store_then_holds(tmp_path):
    config = tiny_config(tmp_path, data={"sample": {"records": 2000}})
    estimate = estimate_size(config.data)
    exact = size_of_store(Store(ensure_store(config.data, tmp_path)), config.data)
    assert not estimate.exact
    assert abs(estimate.tokens / exact.tokens - 1) < 0.05


@pytest.mark.parametrize(
    ("task", "network", "is_used"),
    [
        ("autoencoder", "vectors", False),
        ("diffusion", "vectors", False),
        ("terms", "vectors", False),
        ("terms", "backbone", True),
        ("masked_lm", "vectors", True),
    ],
)
def test_adapters_that_a_task_would_not_train_are_refused_in_a_new_run(tmp_path, task, network, is_used):
    model = {"task": task, "terms": {"network": network}, "backbone": {"lora": {"rank": 2}}}
    config = tiny_config(tmp_path, model=model)
    checked = task_plan(config.data, config.model), config.training, config.deepspeed
    check_task(*checked, is_begun=True)  # its adapters were ignored before, too
    with nullcontext() if is_used else pytest.raises(ConfigError, match=rf"lora\.rank 2: model\.task {task} trains no"):
        check_task(*checked)


def test_plan_says_steps_and_memory(tmp_path):
    config = tiny_config(tmp_path, training={"max_steps": None, "epochs": 3})
    plan, alone = plan_of(config), plan_of(config, workers=1)
    assert plan.steps_per_epoch == -(-plan.data.tokens // 512)
    assert plan.total_steps == 3 * plan.steps_per_epoch
    assert plan.memory.optimizer_bytes == -(-alone.memory.optimizer_bytes // 2), "ZeRO divides it over the workers"
    text = "\n".join(plan.lines())
    assert "2 x cpu" in text
    assert "ZeRO-2" in text
    assert "cropped" in text
    few = plan_of(tiny_config(tmp_path, batch={"batch_size": 1}, training={"max_steps": None}))
    assert few.steps_per_epoch == -(-few.data.sequences // 2), "sequences bound its batches"
    assert "at most 512 in 2 packed batches with at most 1 sequence" in "\n".join(few.lines())


def test_plan_counts_optimizer_mean_and_the_smaller_steps_of_the_start(tmp_path):
    training, batch = {"max_steps": None, "epochs": 2}, {"tokens": 64, "global_tokens": 256}
    changes = [
        ({}, {}),
        ({"optimizer": "muon"}, {}),
        ({"weight_mean": 0.9}, {}),
        ({}, {"first_global_tokens": 64, "ramp_steps": 20}),
    ]
    plain, muon, mean, ramped = (
        plan_of(tiny_config(tmp_path, training=training | more_training, batch=batch | more_batch), workers=1)
        for more_training, more_batch in changes
    )
    parameters = plain.memory.parameters
    assert muon.memory.optimizer_bytes == plain.memory.optimizer_bytes - 4 * parameters.matrices
    assert mean.memory.optimizer_bytes == plain.memory.optimizer_bytes + 4 * parameters.trainable
    sizes = [1] * 7 + [2] * 7 + [3] * 6
    assert ramped.batch.ramp() == sizes
    assert ramped.total_steps - plain.total_steps == 20 - sum(sizes) // 4


@pytest.mark.parametrize("end", [{"max_steps": 9}, {"max_steps": None, "epochs": 3}])
def test_a_warm_up_as_long_as_the_run_is_refused(tmp_path, end):
    training = tiny_config(tmp_path, training={**end, "warmup_steps": 9}).training
    name = list(end)[-1]
    with pytest.raises(ConfigError, match=rf"warmup_steps \(9\) must be less than the 9 steps of training\.{name}"):
        check_warm_up(training, 9)
    check_warm_up(training, 10)
    check_warm_up(training.model_copy(update={"warmup_steps": None}), 1)
