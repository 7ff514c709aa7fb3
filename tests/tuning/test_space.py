import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, ResourceError
from tests.runs import merged, tiny_config
from train_config.tune_schema import TuneConfig
from training.launch.placement import NodeResources
from tuning.settings import Settings
from tuning.space import NAMES, SearchSpace, make_space, needs_at_least

CPUS = [NodeResources(cpus=2, gpus=0)]
GPUS = [NodeResources(cpus=16, gpus=4)]
ONE_WORKER = {"ray": {"num_workers": 1}}


def space_of(tmp_path, values: dict | None = None, nodes=CPUS, keep: bool = True, **changes) -> SearchSpace:
    config = tiny_config(tmp_path, **merged(ONE_WORKER, changes))
    search = TuneConfig.model_validate({"space": values or {}, "keep_global_tokens": keep})
    return make_space(config, search, nodes)


def budgets(space: SearchSpace) -> list[int]:
    return sorted({settings.tokens for settings in space.settings})


def test_default_budgets_are_powers_of_two_from_the_longest_sequence_to_the_global_batch(tmp_path):
    assert budgets(space_of(tmp_path)) == [64, 128, 256, 512]
    assert budgets(space_of(tmp_path, data={"max_length": 63})) == [128, 256, 512]


def test_own_budget_is_among_them_and_they_divide_the_global_batch_unless_it_is_not_kept(tmp_path):
    space = space_of(tmp_path, batch={"tokens": 96, "global_tokens": 384})
    assert budgets(space) == [64, 96, 128]
    assert space.default.tokens == 96
    free = space_of(tmp_path, {"workers": [1, 2], "tokens": [64, 100]}, keep=False)
    assert {(s.tokens, s.workers) for s in free.settings} == {(64, 1), (64, 2), (100, 1), (100, 2)}


def test_budgets_of_several_workers_divide_the_global_batch_among_them(tmp_path):
    space = space_of(tmp_path, {"workers": [1, 2]})
    assert {s.tokens for s in space.settings if s.workers == 2} == {64, 128, 256}
    assert sum(space.left_out.values()) == 12
    assert "do not divide the 512 tokens" in next(iter(space.left_out))


def test_every_combination_is_either_valid_or_counted_with_a_reason(tmp_path):
    values = {"workers": [1, 2, 8], "prefetch": [2, 4], "amp_dtype": ["bf16", "fp16", "none"], "stage": [0, 2]}
    space = space_of(tmp_path, values)
    by_default = (space.values["tokens"], space.values["num_workers"], space.values["gradient_checkpointing"])
    combinations = math.prod(map(len, [*values.values(), *by_default]))
    assert len(space) + sum(space.left_out.values()) == combinations
    assert (space.values["workers"], space.values["amp_dtype"]) == ((1, 2), ("bf16", "none"))
    for name in NAMES:
        assert set(space.values[name]) == {getattr(settings, name) for settings in space.settings}
    assert any("more workers than the 2" in reason for reason in space.left_out)
    assert any("fp16, which needs a GPU" in reason for reason in space.left_out)
    assert any("prefetching" in reason for reason in space.left_out)


def test_on_gpus_fp16_and_a_worker_for_each_are_allowed(tmp_path):
    space = space_of(tmp_path, {"workers": [1, 4, 8], "amp_dtype": ["fp16"]}, nodes=GPUS)
    assert {settings.workers for settings in space.settings} == {1, 4}
    assert {settings.amp_dtype for settings in space.settings} == {"fp16"}


def test_what_makes_no_difference_or_can_not_be_is_left_out(tmp_path):
    space = space_of(tmp_path, {"num_workers": [0, 1], "prefetch": [2, 4, 8]})
    assert {s.prefetch for s in space.settings if s.num_workers == 0} == {4}
    assert {s.prefetch for s in space.settings if s.num_workers == 1} == {2, 4, 8}
    frozen = space_of(tmp_path, model={"backbone": {"frozen": True}})
    assert {settings.gradient_checkpointing for settings in frozen.settings} == {False}
    offloaded = space_of(tmp_path, {"stage": [0, 1]}, deepspeed={"offload_optimizer": True})
    assert {settings.stage for settings in offloaded.settings} == {1}
    too_many = space_of(tmp_path, {"workers": [1, 64]})
    assert set(too_many.left_out) == {"more workers than the 2 that the cluster holds"}


def test_default_is_the_experiment_itself_or_the_nearest_that_is_offered(tmp_path):
    assert space_of(tmp_path).default == Settings(256, None, 0, 4, "none", False, False, 2, 1)
    space = space_of(tmp_path, {"tokens": [64, 512], "num_workers": [1, 3], "amp_dtype": ["bf16"]})
    assert space.default == Settings(512, None, 1, 4, "bf16", False, False, 2, 1)


def test_nearest_configuration_has_another_budget_where_its_own_is_impossible(tmp_path):
    space = space_of(tmp_path, {"workers": [1, 2]})
    largest = replace(space.default, tokens=512)
    assert space.nearest(largest) == largest
    assert space.nearest(replace(largest, workers=2)) == replace(largest, workers=2, tokens=256)


def test_space_without_any_configuration_or_place_is_refused_with_the_reasons(tmp_path):
    with pytest.raises(ConfigError, match=r"is left of 12: 12 because of a budget under the 64 tokens"):
        space_of(tmp_path, {"tokens": [32]})
    with pytest.raises(ResourceError, match="9 workers asked"):
        space_of(tmp_path, ray={"num_workers": 9})


BASE = Settings(1024, None, 1, 4, "bf16", True, False, 2, 2)


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ({"tokens": 2048}, True),
        ({"tokens": 512}, False),
        ({"gradient_checkpointing": False}, True),
        ({"amp_dtype": "none"}, True),
        ({"amp_dtype": "fp16"}, False),
        ({"workers": 1}, True),
        ({"workers": 4}, False),
        ({"num_workers": 0, "prefetch": 1}, True),
        ({"batch_size": 8}, False),
        ({"compile": True}, False),
        ({"stage": 0}, False),
        ({"tokens": 2048, "workers": 4}, False),
    ],
    ids=str,
)
def test_what_needs_at_least_as_much_memory(change, answer):
    assert needs_at_least(replace(BASE, **change), BASE) is answer


def test_without_zero_more_workers_do_not_share_any_memory():
    plain = replace(BASE, stage=0)
    assert needs_at_least(replace(plain, workers=4), plain)


ANY = st.builds(
    Settings,
    tokens=st.sampled_from([512, 1024]),
    batch_size=st.sampled_from([None, 4, 8]),
    num_workers=st.sampled_from([0, 1]),
    prefetch=st.just(4),
    amp_dtype=st.sampled_from(["bf16", "fp16", "none"]),
    gradient_checkpointing=st.booleans(),
    compile=st.booleans(),
    stage=st.sampled_from([0, 2]),
    workers=st.sampled_from([1, 2]),
)


@given(ANY, ANY, ANY)
def test_needing_more_memory_is_an_order(one, other, third):
    assert needs_at_least(one, one)
    if needs_at_least(one, other) and needs_at_least(other, third):
        assert needs_at_least(one, third)
