import pytest
from pydantic import ValidationError

from esmeray.run_folder.checkpoints import CheckpointStore
from esmeray.training.config import Config
from esmeray.training.loop.schedules import learning_rate
from esmeray.training.section import TrainingSection
from tests.runs import events, run_folder, tiny_config, train_losses
from tests.training.runs import assert_same_run, train


def section(**settings) -> TrainingSection:
    return TrainingSection(**{"learning_rate": 1.0, "warmup_steps": 10, "min_learning_rate_share": 0.1} | settings)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("cosine", {35: 0.1 + 0.9 * 0.8535534, 60: 0.55, 110: 0.1}),
        ("linear", {35: 0.775, 60: 0.55, 110: 0.1}),
        ("wsd", {35: 1.0, 88: 1.0, 99: 0.55, 110: 0.1}),
        ("constant", {35: 1.0, 60: 1.0, 109: 1.0}),
    ],
)
def test_warms_up_linearly_then_follows_the_schedule(schedule, rates):
    training = section(schedule=schedule)
    for step, rate in ({0: 0.1, 9: 1.0} | rates).items():
        assert learning_rate(step, 110, training) == pytest.approx(rate)


def test_default_warm_up_is_a_tenth_of_the_run_and_wsd_has_none():
    assert learning_rate(9, 200, section(warmup_steps=None)) == pytest.approx(0.5)
    with pytest.raises(ValidationError, match="schedule wsd: set warmup_steps"):
        section(schedule="wsd", warmup_steps=None)


@pytest.mark.usefixtures("process_group")
def test_run_extended_in_its_stable_phase_equals_a_run_planned_longer(store_path, tmp_path):
    def run(name: str, max_steps: int) -> Config:
        training = {"max_steps": max_steps, "schedule": "wsd", "decay_share": 0.5, "evaluate_every_steps": 100}
        checkpoint = {"keep_last": 1, "every_steps": 7}
        # Other values that depend on the step: the global batch, the mask share, Muon's momentum.
        training |= {"optimizer": "muon"}
        config = tiny_config(
            tmp_path / name,
            training=training,
            checkpoint=checkpoint,
            model={"task": "masked_lm", "masked_lm": {"first_mask_share": 0.5, "mask_share_steps": 10}},
            batch={"first_global_tokens": 256, "ramp_steps": 10},
        )
        assert train(config, store_path).status == "finished"
        return config

    long = run("long", 12)
    short = run("prolonged", 8)
    kept = [folder.step for folder in CheckpointStore(run_folder(short).checkpoints).complete()]
    assert kept == [8, 4], "besides the newest the one in which the rate had not decayed"
    assert train_losses(short) != {step: loss for step, loss in train_losses(long).items() if step <= 8}
    prolonged = run("prolonged", 12)
    assert [event["step"] for event in events(prolonged, "resumed")] == [4]
    warning = events(prolonged, "warning")[0]["message"]
    assert "step-00000008 can't be used: its learning rate was already decaying towards" in warning
    assert_same_run(prolonged, long)
