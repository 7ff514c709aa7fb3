"""A task as the driver sees it: its data made ready, and the size of data and model, before any worker starts.

The worker's side of a task is :mod:`training.tasks.experiment`. Imports neither torch nor transformers, so that a plan
and a refusal are there at once; modules of the tasks keep to it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from common.errors import ConfigError
from common.progress import ProgressCallback
from dataset.batches.cropping import CropCount
from dataset.fasta.counts import IngestCounts
from model.cost.memory import ParameterCount
from run_folder.checkpoints import CheckpointFolder
from run_folder.paths import RunFolder
from train_config.schema import Config
from training.engine.deepspeed_settings import zero_stage


@dataclass(frozen=True)
class DataSize:
    """Size of the data to train on: tokens after cropping, special tokens included, and what an epoch crops.

    ``held_out`` are sequences of the validation, ``counts`` what reading changed or left out, where that is known.
    """

    sequences: int
    tokens: int
    cropped: CropCount
    exact: bool
    held_out: int = 0
    counts: IngestCounts | None = None


class TaskSize(NamedTuple):
    """Size of the data to train on and of the model."""

    data: DataSize
    parameters: ParameterCount


@dataclass(frozen=True)
class TaskPlan(ABC):
    """One task of an experiment, resolved, before it is trained.

    ``in_process``: one worker on the CPU trains in the driver's process, without a cluster.
    """

    in_process = False

    config: Config

    def check_stage(self, *, padded: bool) -> None:
        """Raise ConfigError for ZeRO-3 with a padded backbone."""
        stage = zero_stage(self.config.training, self.config.deepspeed)
        if stage == 3 and padded:
            raise ConfigError(
                "deepspeed.stage 3: a padded backbone is called once for each group of like lengths, of which workers "
                "have different numbers, so that they would wait for one another: use stage 2"
            )

    @abstractmethod
    def prepare(self, root: Path, progress: ProgressCallback | None = None) -> Path:
        """Make, or find, the data in a folder of stores and return its own; ConfigError, DataError for a refusal."""

    @abstractmethod
    def location(self, root: Path) -> Path:
        """Return the folder that :meth:`prepare` uses, whether or not it is there."""

    @abstractmethod
    def checksum(self, path: Path) -> str:
        """Return the identity of prepared data, which a checkpoint can't be resumed without."""

    @abstractmethod
    def measure(self, path: Path) -> TaskSize:
        """Count prepared data and the model's parameters; ConfigError where the model can't be, or take this data."""

    def estimate(self) -> TaskSize:
        """Return the sizes of :meth:`measure`, or about so, with nothing left behind; refuses alike."""
        with TemporaryDirectory() as folder:
            return self.measure(self.prepare(Path(folder)))

    def check_resumed(self, checkpoint: CheckpointFolder, path: Path) -> None:  # noqa: B027
        """Raise CheckpointError for data that its model would read otherwise than before, as with another tokenizer."""

    def write_names(self, run: RunFolder, path: Path) -> None:  # noqa: B027
        """Write what names the model's inputs and outputs into the folder of a run that was accepted."""
