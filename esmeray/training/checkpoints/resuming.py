"""Checks before a run writes anything: is the command refused, does it resume, or is the run already finished?"""

import json
from functools import cached_property

from esmeray.common.errors import CheckpointError, ConfigError
from esmeray.common.text import counted
from esmeray.run_folder.checkpoints import CheckpointStore
from esmeray.run_folder.job import Difference, differences
from esmeray.run_folder.paths import RunFolder
from esmeray.train_config.natures import END, FIXED, FREE, UNSEEN, OnResume, on_resume
from esmeray.training.config import Config, load_config, with_precision


class Resumption:
    """A config and the run with its name, which may have started with other settings."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.run = RunFolder(config.run.storage_path, config.run.name)
        self.checkpoints = CheckpointStore(self.run.checkpoints)

    def with_first_precision(self) -> "Resumption":
        """Return a copy with the precision and the warm-up that the run started with, if the config sets none."""
        if not (self.run.config.exists() and self.checkpoints.complete()):
            return self
        # The defaults may have been different at the start: on other processors, or in an earlier version.
        begun = load_config(self.run.config, is_stored=True).training
        config = with_precision(self.config, begun.precision)
        if config.training.warmup_steps is None:
            training = config.training.model_copy(update={"warmup_steps": begun.warmup_steps})
            config = config.model_copy(update={"training": training})
        return Resumption(config)

    def check(self) -> list[str]:
        """Check ``run.resume`` and that no fixed setting changed. Returns remarks on other settings that changed.

        Raises ConfigError if a fixed setting changed or the run must not exist, and CheckpointError if the run must
        exist.
        """
        run, resume = self.run, self.config.run.resume
        # Checked early: with a path that is not UTF-8 the first checkpoint's manifest would fail with
        # UnicodeEncodeError.
        json.dumps(self.config.model_dump(mode="json"), ensure_ascii=False).encode()
        if not run.config.exists():
            if resume == "must":
                raise CheckpointError(
                    f"{run.path}: run not found, but run.resume is 'must': check run.name and run.storage_path"
                )
            return []
        if resume == "never":
            raise ConfigError(
                f"{run.path}: the run exists, but run.resume is 'never': choose another run.name, or set "
                "run.resume to allow"
            )
        # Without a checkpoint the run starts from scratch, with any settings.
        if self.checkpoints.complete() and (change := self._changed(FIXED)):
            raise ConfigError(
                f"{change}, but the run {run.path.name} already has checkpoints: change the setting back, or "
                "choose another run.name"
            )
        return [str(change) for change in self._changes if on_resume(Config, change.key) is not UNSEEN]

    def is_finished(self) -> bool:
        """Test whether the run has reached its end and no more steps are requested.

        Raises ConfigError if it has, and a setting that its result depends on changed.
        """
        outcome = self.run.read_outcome()
        if not self.run.config.exists() or outcome is None or outcome.status != "finished":
            return False
        # Check this first: a run that is prolonged may use other free settings for the added steps.
        if self._changed(END):
            return False
        if change := self._changed(FIXED) or self._changed(FREE):
            raise ConfigError(
                f"{change}, but the run {self.run.path.name} is finished: change the setting back, choose "
                "another run.name, or raise training.max_steps or training.epochs to continue training with it"
            )
        return True

    def check_steps(self, total_steps: int) -> None:
        """Raise ConfigError if the end of training was changed and no steps remain after the newest checkpoint."""
        folder = self.checkpoints.newest_intact()
        if folder is None or total_steps > folder.step:
            return
        if change := self._changed(END):
            raise ConfigError(
                f"{change}, so training would end after {total_steps} steps, but the run {self.run.path.name} "
                f"is already at step {folder.step}: raise training.max_steps or training.epochs, or choose "
                "another run.name"
            )

    def remark_on_workers(self, count: int) -> str | None:
        """Return a remark if the newest checkpoint was written by a different number of workers, otherwise None."""
        folder = self.checkpoints.newest_intact()
        if folder is None or (written_by := folder.manifest().world_size) == count:
            return None
        return f"resuming a checkpoint of {counted(written_by, 'worker{s}')} with {counted(count, 'worker{s}')}"

    @cached_property
    def _changes(self) -> list[Difference]:
        return differences(load_config(self.run.config, is_stored=True).model_dump(), self.config.model_dump())

    def _changed(self, nature: OnResume) -> Difference | None:
        return next((change for change in self._changes if on_resume(Config, change.key) is nature), None)
