"""A task, and one on residues, as the driver sees it: data made ready, sizes of data and model, before any worker.

The worker's side of a task is :mod:`esmeray.tasks.experiment`. Imports neither torch nor transformers, so that
a plan and a refusal are there at once; modules of the tasks keep to it.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from esmeray.common.errors import ConfigError
from esmeray.common.progress import ProgressCallback, no_progress
from esmeray.common.remote import local_path
from esmeray.dataset.batches.preparation import CropCount, count_cropped, cropped_lengths
from esmeray.dataset.batches.random_bits import split_records
from esmeray.dataset.fasta.counts import Counts
from esmeray.dataset.fasta.reader import FastaSource
from esmeray.dataset.section import SPECIAL_TOKENS_PER_SEQUENCE, DataSection
from esmeray.dataset.store.conversion import SAMPLE, ensure_store, store_location
from esmeray.dataset.store.format import MANIFEST_FILE
from esmeray.dataset.store.reader import Store
from esmeray.dataset.store.sample import sample_records
from esmeray.model.backbones.source import is_padded, source_type
from esmeray.model.cost.memory import ParameterCount, count_parameters
from esmeray.run_folder.checkpoints import CheckpointFolder
from esmeray.run_folder.paths import RunFolder
from esmeray.tasks.registry import part_named, task_named
from esmeray.tasks.section import ModelSection


@dataclass(frozen=True)
class DataSize:
    """Size of the data to train on: tokens after cropping, special tokens included, and what an epoch crops.

    ``held_out`` are sequences of the validation, ``counts`` what reading changed or left out, where that is known,
    ``labels`` what is to be learnt of labelled records, in words, and ``unknown`` a line on tokens that the vocabulary
    lacks.
    """

    sequences: int
    tokens: int
    cropped: CropCount
    exact: bool
    held_out: int = 0
    counts: Counts | None = None
    labels: str | None = None
    unknown: str | None = None


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

    data: DataSection
    model: ModelSection

    @property
    def padded(self) -> bool:
        """Test for a backbone that takes padded batches."""
        backbone = self.model.backbone
        return is_padded(backbone, source_type(backbone))

    @abstractmethod
    def prepare(self, root: Path, progress: ProgressCallback = no_progress) -> Path:
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
        plan = self
        if self.data.store is not None and not Path(self.data.store).exists():  # it would stay
            plan = replace(self, data=self.data.model_copy(update={"store": None}))
        with TemporaryDirectory() as folder:
            return plan.measure(plan.prepare(Path(folder)))

    def check_resumed(self, checkpoint: CheckpointFolder, path: Path) -> None:  # noqa: B027
        """Raise CheckpointError for data that its model would read otherwise than before, as with another tokenizer."""

    def write_names(self, run: RunFolder, path: Path) -> None:  # noqa: B027
        """Write what names the model's inputs and outputs into the folder of a run that was accepted."""


def task_plan(data: DataSection, model: ModelSection) -> TaskPlan:
    """Return the driver's side of the task that the model is of."""
    return part_named(task_named(model.task).plan)(data, model)


class ResiduePlan(TaskPlan):
    """A task on a store of residues, whose experiment is a :class:`~esmeray.tasks.experiment.ResidueExperiment`."""

    def prepare(self, root: Path, progress: ProgressCallback = no_progress) -> Path:
        self.location(root)  # refuses sources that are not there at once: counting a model loads torch
        self._model()  # refuses an impossible model before the data is read
        return ensure_store(self.data, root, progress)

    def location(self, root: Path) -> Path:
        return store_location(self.data, root)

    def checksum(self, path: Path) -> str:
        return Store(path).checksum

    def measure(self, path: Path) -> TaskSize:
        store = Store(path)
        return self._checked(size_of_store(store, self.data), store)

    def estimate(self) -> TaskSize:
        """Read the head of the sources."""
        return TaskSize(estimate_size(self.data), count_parameters(self._model()))

    def _checked(self, size: DataSize, store: Store) -> TaskSize:
        """The size with a count of what the vocabulary lacks; raises as :meth:`measure`, DataError if that is most."""
        model = self._model(int(store.lengths.max()))
        unknown = model.backbone.unknown_letters.report(map(store.text, range(len(store))))
        return TaskSize(replace(size, unknown=unknown), count_parameters(model))

    def _model(self, longest: int = 0) -> Any:
        """The model without weights; ConfigError if it can't take sequences of ``longest`` residues, cropped."""
        source_type(self.model.backbone)  # refuses a wrong source within a second, before torch is loaded
        # By name, and only now: the experiment's module loads torch. Empty: 15 billion weights would fill the memory.
        experiment = part_named(task_named(self.model.task).experiment)
        model = experiment.new_model(self.model, seed=0, empty=True)
        check_length(self.data, model.backbone.longest, SPECIAL_TOKENS_PER_SEQUENCE, longest)
        return model


def check_length(data: DataSection, positions: int | None, special: int, longest: int) -> None:
    """Refuse a ``data.max_length`` beyond a backbone's ``positions``, and longer texts under the default.

    ``special``: tokens around each text. ``longest``: tokens of the longest text without them. Raises ConfigError.
    """
    # Here and not by the first batch that holds it, which may come after hours.
    limit = (positions or math.inf) - special
    # No user chose the default: with short texts it cuts nothing.
    is_chosen = data.max_length != DataSection.model_fields["max_length"].default
    if data.max_length > limit and (is_chosen or longest > limit):
        texts = f", and the longest text has {longest}" if longest else ""
        raise ConfigError(
            f"data.max_length {data.max_length}: this backbone takes at most {limit} tokens of a text{texts}; set it "
            f"to at most {limit}"
        )


def size_of_store(store: Store, data: DataSection) -> DataSize:
    """Count the training part of a store."""
    training, held_out = split_records(store.sequence_hashes, data.validation_share)
    return size_of_lengths(store.lengths[training], data, held_out=held_out.size, counts=store.manifest.counts)


def estimate_size(data: DataSection) -> DataSize:
    """Estimate the size of training on the source, reading no more than the head of the files."""
    # A store knows its lengths: nothing is estimated.
    if len(data.source) == 1 and ((path := local_path(data.source[0])) / MANIFEST_FILE).is_file():
        return size_of_store(Store(path), data)
    lengths, share_read = _head_lengths(data)
    head = size_of_lengths(np.array(lengths), data)
    # The head, by its share of the bytes, stands for all that follows.
    scale = (1 - data.validation_share) / share_read
    return DataSize(
        sequences=round(head.sequences * scale),
        tokens=round(head.tokens * scale),
        cropped=CropCount(round(head.cropped.sequences * scale), round(head.cropped.residues * scale)),
        exact=False,
        held_out=round(head.sequences * data.validation_share / share_read),
    )


def _head_lengths(data: DataSection) -> tuple[list[int], float]:
    if data.source == [SAMPLE]:
        sample = data.sample
        # The sample is made, not read: all of it costs less than a head of a file.
        return [len(sequence) for _, sequence in sample_records(sample.records, sample.families, sample.seed)], 1.0
    source = FastaSource(data.source, data.ingest.max_residues)
    lengths: list[int] = []
    for batch in source.batches():
        lengths += map(len, batch.records.sequences)
        # Records enough for an estimate.
        if len(lengths) >= 50_000:
            # Never 0, as sizes are divided by it.
            return lengths, max(source.bytes_read / source.bytes_total, 1e-9)
    return lengths, 1.0


def size_of_lengths(lengths_N: np.ndarray, data: DataSection, **known: Any) -> DataSize:
    """The size of training on records of these lengths (N,), in residues; ``known``: other fields."""
    tokens = cropped_lengths(lengths_N, data.max_length) + SPECIAL_TOKENS_PER_SEQUENCE
    return DataSize(lengths_N.size, int(tokens.sum()), count_cropped(lengths_N, data.max_length), exact=True, **known)
