import pytest

from esmeray.common.errors import CheckpointError, ConfigError, ResourceError
from esmeray.run_folder.checkpoints import CheckpointStore
from esmeray.run_folder.job import held
from esmeray.run_folder.paths import Outcome
from esmeray.train_config.loading import dump_config
from esmeray.training.checkpoints.resuming import Resumption
from esmeray.training.config import Config, with_precision
from tests.runs import a_manifest, run_folder, tiny_config


@pytest.fixture
def begun(tmp_path):
    config = tiny_config(tmp_path)
    run = run_folder(config)
    run.path.mkdir()
    run.config.write_text(dump_config(config))
    return run


def test_run_that_must_or_must_not_exist_is_refused(begun, tmp_path):
    with pytest.raises(ConfigError, match="the run exists"):
        Resumption(tiny_config(tmp_path, run={"resume": "never"})).check()
    missing = tiny_config(tmp_path / "elsewhere", run={"resume": "must"})
    with pytest.raises(CheckpointError, match="run not found, but"):
        Resumption(missing).check()


def write_checkpoint(run) -> None:
    """A manifest of two workers at step 4, without shards."""
    folder = CheckpointStore(run.checkpoints).folder(4).path
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(a_manifest(4, world_size=2).sealed().model_dump_json())


def test_another_number_of_workers_is_remarked(begun, tmp_path):
    write_checkpoint(begun)
    resumption = Resumption(tiny_config(tmp_path, ray={"num_workers": 3}))
    assert resumption.check() == []
    assert resumption.remark_on_workers(2) is None
    assert resumption.remark_on_workers(3) == "resuming a checkpoint of 2 workers with 3 workers"


def test_permitted_changes_are_reported_when_a_run_resumes(begun, tmp_path):
    changes = {"training": {"learning_rate": 0.5}, "ray": {"max_failures": 9}, "batch": {"tokens": 128}}
    remarks = Resumption(tiny_config(tmp_path, **changes)).check()
    assert sorted(remarks) == ["batch.tokens was 256, is now 128", "training.learning_rate was 0.01, is now 0.5"]


def test_default_precision_of_a_resumed_run_is_the_checkpoints(begun, tmp_path):
    settings = tiny_config(tmp_path).model_dump()
    del settings["training"]["precision"]
    config = Config.model_validate(settings)
    fresh = Resumption(with_precision(Resumption(config).with_first_precision().config, "bf16"))
    assert fresh.check() == ["training.precision was 'fp32', is now 'bf16'"], "without a checkpoint nothing is resumed"
    write_checkpoint(begun)
    resumed = Resumption(with_precision(Resumption(config).with_first_precision().config, "bf16"))
    assert resumed.config.training.precision == "fp32" and resumed.check() == []
    with pytest.raises(ConfigError, match="precision was 'fp32', is now 'bf16'"):
        Resumption(tiny_config(tmp_path, training={"precision": "bf16"})).with_first_precision().check()


def test_run_is_finished_until_more_steps_are_asked(begun, tmp_path):
    assert not Resumption(tiny_config(tmp_path)).is_finished()
    begun.write_outcome(Outcome("finished", 8, "", 0))
    assert Resumption(tiny_config(tmp_path)).is_finished()
    assert not Resumption(tiny_config(tmp_path, training={"max_steps": 20})).is_finished()
    assert not Resumption(tiny_config(tmp_path, model={"classifier": {"patience": 50}})).is_finished()


def test_same_run_is_not_trained_twice_at_once(begun):
    with held(begun.path), pytest.raises(ResourceError, match=r"in use by process"), held(begun.path):
        pytest.fail("locked twice")


def test_full_disk_at_the_lock_is_one_line_and_leaves_no_folder(tmp_path, full_disk):
    run = run_folder(tiny_config(tmp_path))
    with full_disk(0), pytest.raises(ResourceError, match="no space left"), held(run.path):
        pytest.fail("locked")
    assert not run.path.exists()
