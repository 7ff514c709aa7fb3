"""Checks before anything of a run is written: refuse, resume, or finished already."""

from __future__ import annotations

from common.errors import CheckpointError, ConfigError
from run_folder.job import Difference, differences
from run_folder.paths import RunFolder
from train_config.loading import load_recorded
from train_config.natures import END, FIXED, FREE, UNSEEN, OnResume, on_resume
from train_config.schema import Config, DataSection
from training.checkpoints.checkpoint import CheckpointStore


def check_resume(run: RunFolder, config: Config) -> list[str]:
    """Check what ``run.resume`` allows and that no fixed setting changed; returns remarks on others that did.

    Raises ConfigError where it did or the run must not exist, CheckpointError where the run must exist.
    """
    if not run.exists:
        if config.run.resume == "must":
            raise CheckpointError(
                f"{run.path}: no such run, and run.resume is 'must': check run.name and run.storage_path"
            )
        return []
    if config.run.resume == "never":
        raise ConfigError(
            f"{run.path}: the run exists, and run.resume is 'never': choose another run.name, or run.resume allow"
        )
    changed = _changed(run, config)
    # Without a checkpoint the run begins anew, with whatever settings.
    if CheckpointStore(run.checkpoints).complete() and (change := _of_nature(changed, FIXED)):
        raise ConfigError(
            f"{change}, and the run {run.path.name} has checkpoints: set it back, or choose another run.name"
        )
    return [str(change) for change in changed if on_resume(Config, change.key) is not UNSEEN]


def check_worker_count(run: RunFolder, count: int) -> None:
    """Raise CheckpointError for another number of workers than the newest checkpoint was written by."""
    folder = CheckpointStore(run.checkpoints).newest_intact()
    if folder is not None and (written_by := folder.manifest().world_size) != count:
        raise CheckpointError(
            f"{folder.path}: written by {written_by} workers, this run has {count}; "
            f"ZeRO's shards belong to a number of workers: set ray.num_workers to {written_by}"
        )


def check_data(run: RunFolder, data: DataSection, checksum: str) -> None:
    """Raise CheckpointError for data whose store has another checksum than that of the newest checkpoint."""
    folder = CheckpointStore(run.checkpoints).newest_intact()
    if folder is None or (earlier := folder.manifest()).store_checksum == checksum:
        return
    before, now = ", ".join(earlier.config["data"]["source"]), ", ".join(data.source)
    raise CheckpointError(
        f"data.source: the run {run.path.name} was trained on {before} (checksum {earlier.store_checksum[:12]}), not "
        f"on {now}{' as it is' if now == before else ''} (checksum {checksum[:12]}): "
        "restore that data, or choose another run.name"
    )


def as_begun(run: RunFolder, config: Config) -> Config:
    """The config with the warm-up that the run began with, where none is given."""
    if config.training.warmup_steps is not None or not (run.exists and CheckpointStore(run.checkpoints).complete()):
        return config
    warmup_steps = load_recorded(run.config).training.warmup_steps
    training = config.training.model_copy(update={"warmup_steps": warmup_steps})
    return config.model_copy(update={"training": training})


def is_finished(run: RunFolder, config: Config) -> bool:
    """Test for a run that reached its end where no more steps are asked for.

    Raises ConfigError where it did, and a setting that its result depends on changed.
    """
    outcome = run.read_outcome()
    if not run.exists or outcome is None or outcome.status != "finished":
        return False
    changed = _changed(run, config)
    if _of_nature(changed, END):
        return False
    if change := _of_nature(changed, FIXED) or _of_nature(changed, FREE):
        raise ConfigError(
            f"{change}, and the run {run.path.name} is finished: set it back, choose another run.name, or raise "
            "training.max_steps or training.epochs to train further with it"
        )
    return True


def check_steps(run: RunFolder, config: Config, total_steps: int) -> None:
    """Raise ConfigError for a changed end of training that leaves no step to take after the newest checkpoint."""
    folder = CheckpointStore(run.checkpoints).newest_intact()
    if folder is None or total_steps > folder.step:
        return
    if change := _of_nature(_changed(run, config), END):
        raise ConfigError(
            f"{change}, so that training would end after {total_steps} steps, and the run "
            f"{run.path.name} has taken {folder.step} already: raise training.max_steps or training.epochs, or choose "
            "another run.name"
        )


def _changed(run: RunFolder, config: Config) -> list[Difference]:
    """Settings that differ from those that the run recorded."""
    return differences(load_recorded(run.config).model_dump(), config.model_dump())


def _of_nature(changed: list[Difference], nature: OnResume) -> Difference | None:
    """The first changed setting of this nature."""
    return next((change for change in changed if on_resume(Config, change.key) is nature), None)
