"""Checks before anything of a run is written: refuse, resume, or finished already."""

import json
from dataclasses import dataclass
from functools import cached_property

from esmeray.common.errors import CheckpointError, ConfigError
from esmeray.common.text import counted
from esmeray.run_folder.checkpoints import CheckpointStore
from esmeray.run_folder.job import Difference, differences
from esmeray.run_folder.paths import RunFolder
from esmeray.train_config.natures import END, FIXED, FREE, UNSEEN, OnResume, on_resume
from esmeray.training.config import Config, load_config, with_precision


@dataclass
class Resumption:
    """A config, and the run of its name, which may have begun with other settings."""

    config: Config

    def __post_init__(self) -> None:
        self.run = RunFolder(self.config.run.storage_path, self.config.run.name)
        self.checkpoints = CheckpointStore(self.run.checkpoints)

    def as_begun(self) -> "Resumption":
        """The same with the precision and the warm-up that the run began with, if none is given."""
        if not (self.run.config.exists() and self.checkpoints.complete()):
            return self
        # The defaults may have been others when it began: on other processors, or of an earlier version.
        begun = load_config(self.run.config).training
        config = with_precision(self.config, begun.precision)
        if config.training.warmup_steps is None:
            training = config.training.model_copy(update={"warmup_steps": begun.warmup_steps})
            config = config.model_copy(update={"training": training})
        return Resumption(config)

    def check(self) -> list[str]:
        """Check what ``run.resume`` allows and that no fixed setting changed; returns remarks on others that did.

        Raises ConfigError where it did or the run must not exist, CheckpointError where the run must exist.
        """
        run, resume = self.run, self.config.run.resume
        # The manifest of the first checkpoint could not be written: UnicodeEncodeError for a path that is not UTF-8.
        json.dumps(self.config.model_dump(mode="json"), ensure_ascii=False).encode()
        if not run.config.exists():
            if resume == "must":
                raise CheckpointError(
                    f"{run.path}: no such run, and run.resume is 'must': check run.name and run.storage_path"
                )
            return []
        if resume == "never":
            raise ConfigError(
                f"{run.path}: the run exists, and run.resume is 'never': choose another run.name, or run.resume allow"
            )
        # Without a checkpoint the run begins anew, with whatever settings.
        if self.checkpoints.complete() and (change := self._changed(FIXED)):
            raise ConfigError(
                f"{change}, and the run {run.path.name} has checkpoints: set it back, or choose another run.name"
            )
        return [str(change) for change in self._changes if on_resume(Config, change.key) is not UNSEEN]

    def is_finished(self) -> bool:
        """Test for a run that reached its end where no more steps are asked for.

        Raises ConfigError where it did, and a setting that its result depends on changed.
        """
        outcome = self.run.read_outcome()
        if not self.run.config.exists() or outcome is None or outcome.status != "finished":
            return False
        # First: a run that is to be longer may have other free settings for what is added.
        if self._changed(END):
            return False
        if change := self._changed(FIXED) or self._changed(FREE):
            raise ConfigError(
                f"{change}, and the run {self.run.path.name} is finished: set it back, choose another run.name, or "
                "raise training.max_steps or training.epochs to train further with it"
            )
        return True

    def check_steps(self, total_steps: int) -> None:
        """Raise ConfigError for a changed end of training that leaves no step to take after the newest checkpoint."""
        folder = self.checkpoints.newest_intact()
        if folder is None or total_steps > folder.step:
            return
        if change := self._changed(END):
            raise ConfigError(
                f"{change}, so that training would end after {total_steps} steps, and the run "
                f"{self.run.path.name} has taken {folder.step} already: raise training.max_steps or training.epochs, "
                "or choose another run.name"
            )

    def remark_on_workers(self, count: int) -> str | None:
        """A remark where this many workers resume the checkpoint of another number."""
        folder = self.checkpoints.newest_intact()
        if folder is None or (written_by := folder.manifest().world_size) == count:
            return None
        return f"a checkpoint of {counted(written_by, 'worker{s}')} is resumed by {counted(count, 'worker{s}')}"

    @cached_property
    def _changes(self) -> list[Difference]:
        return differences(load_config(self.run.config).model_dump(), self.config.model_dump())

    def _changed(self, nature: OnResume) -> Difference | None:
        return next((change for change in self._changes if on_resume(Config, change.key) is nature), None)
