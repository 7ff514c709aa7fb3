"""The driver's side of a task: preparing data, and sizes of data and model, before any worker starts.

The worker's side is :mod:`esmeray.tasks.experiment`. This module imports neither torch nor transformers, so that plans
and error messages appear at once. The plan modules of the tasks follow the same rule.
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
    """Size of the training data: tokens after cropping, including special tokens, and the part that an epoch crops.

    - ``held_out``: number of validation sequences.
    - ``counts``: changes and omissions while reading, if known.
    - ``labels``: description of the targets of labelled records.
    - ``unknown``: message about tokens that the vocabulary lacks.
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
    """Size of the training data and of the model."""

    data: DataSize
    parameters: ParameterCount


@dataclass(frozen=True)
class TaskPlan(ABC):
    """One task of an experiment, resolved, before training.

    ``in_process``: if one worker on the CPU suffices, train in the driver's process, without a cluster.
    """

    in_process = False

    data: DataSection
    model: ModelSection

    @property
    def padded(self) -> bool:
        """Test whether the backbone takes padded batches."""
        backbone = self.model.backbone
        return is_padded(backbone, source_type(backbone))

    @property
    def trains_adapters(self) -> bool:
        """Test whether the model has the adapters of model.backbone.lora."""
        return task_named(self.model.task).lora

    @abstractmethod
    def prepare(self, root: Path, progress: ProgressCallback = no_progress) -> Path:
        """Prepare, or find, the data in a folder of stores and return its path. Raises ConfigError or DataError."""

    @abstractmethod
    def location(self, root: Path) -> Path:
        """Return the path that :meth:`prepare` uses, whether or not it exists."""

    @abstractmethod
    def checksum(self, path: Path) -> str:
        """Return the identity of prepared data; a checkpoint resumes only with the same data."""

    @abstractmethod
    def measure(self, path: Path) -> TaskSize:
        """Measure prepared data and the model. Raises ConfigError if the model is impossible or can't take this
        data."""

    def estimate(self) -> TaskSize:
        """Return the sizes of :meth:`measure`, or estimates of them, and leave no files. Raises the same errors."""
        plan = self
        if self.data.store is not None and not Path(self.data.store).exists():  # otherwise the store would stay
            plan = replace(self, data=self.data.model_copy(update={"store": None}))
        with TemporaryDirectory() as folder:
            return plan.measure(plan.prepare(Path(folder)))

    def check_resumed(self, checkpoint: CheckpointFolder, path: Path) -> None:  # noqa: B027
        """Raise CheckpointError if the model would read the data differently than before, e.g. with another
        tokenizer."""

    def write_names(self, run: RunFolder, path: Path) -> None:  # noqa: B027
        """Write the names of the model's inputs and outputs to the folder of a run that passed its checks."""


def task_plan(data: DataSection, model: ModelSection) -> TaskPlan:
    """Return the plan of the model's task."""
    return part_named(task_named(model.task).plan)(data, model)


class ResiduePlan(TaskPlan):
    """A task on a store of residues, whose experiment is a :class:`~esmeray.tasks.experiment.ResidueExperiment`."""

    def prepare(self, root: Path, progress: ProgressCallback = no_progress) -> Path:
        self.location(root)  # raises at once for missing sources: counting a model loads torch
        self._model()  # raises for an impossible model before the data is read
        return ensure_store(self.data, root, progress)

    def location(self, root: Path) -> Path:
        return store_location(self.data, root)

    def checksum(self, path: Path) -> str:
        return Store(path).checksum

    def measure(self, path: Path) -> TaskSize:
        store = Store(path)
        return self._checked(size_of_store(store, self.data), store)

    def estimate(self) -> TaskSize:
        """Estimate the sizes from the head of the sources."""
        return TaskSize(estimate_size(self.data), count_parameters(self._model()))

    def _checked(self, size: DataSize, store: Store) -> TaskSize:
        """Add the count of unknown letters. Raises as :meth:`measure`, and DataError if most letters are unknown."""
        model = self._model(int(store.lengths.max()))
        unknown = model.backbone.unknown_letters.report(map(store.text, range(len(store))))
        return TaskSize(replace(size, unknown=unknown), count_parameters(model))

    def _model(self, longest: int = 0) -> Any:
        """Return the model without weights. Raises ConfigError if it can't take ``longest`` residues, after
        cropping."""
        source_type(self.model.backbone)  # raises for a wrong source within a second, before torch is loaded
        # Imported by name, and only here: the experiment's module loads torch. Empty, since 15 billion weights would
        # fill the memory.
        experiment = part_named(task_named(self.model.task).experiment)
        model = experiment.new_model(self.model, seed=0, empty=True)
        check_length(self.data, model.backbone.longest, SPECIAL_TOKENS_PER_SEQUENCE, longest)
        return model


def check_length(data: DataSection, positions: int | None, special: int, longest: int) -> None:
    """Check that ``data.max_length``, or the longest text under the default, fits into a backbone's ``positions``.

    ``special``: special tokens around each text. ``longest``: tokens of the longest text without special tokens. Raises
    ConfigError.
    """
    # Checked here, since the first batch with such a text may come after hours.
    limit = (positions or math.inf) - special
    # The default is no user's choice: with short texts it crops nothing and is accepted.
    is_chosen = data.max_length != DataSection.model_fields["max_length"].default
    if data.max_length > limit and (is_chosen or longest > limit):
        texts = f" (the longest text has {longest})" if longest else ""
        raise ConfigError(
            f"data.max_length {data.max_length}: this backbone supports at most {limit} tokens per text{texts}; "
            f"set it to at most {limit}"
        )


def size_of_store(store: Store, data: DataSection) -> DataSize:
    """Measure the training part of a store."""
    training, held_out = split_records(store.sequence_hashes, data.validation_share)
    return size_of_lengths(store.lengths[training], data, held_out=held_out.size, counts=store.manifest.counts)


def estimate_size(data: DataSection) -> DataSize:
    """Estimate the size of the training data from the head of the source files."""
    # A store contains its lengths, so they are exact.
    if len(data.source) == 1 and ((path := local_path(data.source[0])) / MANIFEST_FILE).is_file():
        return size_of_store(Store(path), data)
    lengths, share_read = _head_lengths(data)
    head = size_of_lengths(np.array(lengths), data)
    # Scale the head by its share of the bytes.
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
        # The sample is generated, not read: all of it costs less than the head of a file.
        return [len(sequence) for _, sequence in sample_records(sample.records, sample.families)], 1.0
    source = FastaSource(data.source)
    lengths: list[int] = []
    for batch in source.batches():
        lengths += map(len, batch.records.sequences)
        # Enough records for an estimate.
        if len(lengths) >= 50_000:
            # At least 1e-9, since sizes are divided by it.
            return lengths, max(source.bytes_read / source.bytes_total, 1e-9)
    return lengths, 1.0


def size_of_lengths(lengths_N: np.ndarray, data: DataSection, **known: Any) -> DataSize:
    """Return the size of training on records of these lengths (N,), in residues. ``known``: other fields."""
    tokens = cropped_lengths(lengths_N, data.max_length) + SPECIAL_TOKENS_PER_SEQUENCE
    return DataSize(lengths_N.size, int(tokens.sum()), count_cropped(lengths_N, data.max_length), exact=True, **known)
