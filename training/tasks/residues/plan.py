"""Tasks that learn from residues alone, before training: a store, and the size of a backbone with its head."""

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path

import numpy as np

from common.progress import ProgressCallback
from dataset.batches.cropping import CropCount, count_cropped, cropped_lengths
from dataset.batches.splitting import split_records
from dataset.fasta.reader import FastaSource
from dataset.store.conversion import SAMPLE, ensure_store, store_location
from dataset.store.format import MANIFEST_FILE
from dataset.store.reader import Store
from dataset.store.sample import sample_records
from model.backbones.source import is_padded, source_type
from model.cost.memory import ParameterCount
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE, DataSection, ModelSection
from training.tasks.plan import DataSize, TaskPlan, TaskSize

HEAD_RECORDS = 50_000
"""Records that an estimate reads."""


class ResiduePlan(TaskPlan):
    """A task on a store of residues."""

    @staticmethod
    @abstractmethod
    def count_parameters(section: ModelSection) -> ParameterCount:
        """Return the model's parameters, and those to train; ConfigError for an impossible model."""

    def prepare(self, root: Path, progress: ProgressCallback | None = None) -> Path:
        self._parameters()  # refuses an impossible model before the data is read
        return ensure_store(self.config.data, root, progress)

    def location(self, root: Path) -> Path:
        return store_location(self.config.data, root)

    def checksum(self, path: Path) -> str:
        return Store(path).checksum

    def measure(self, path: Path) -> TaskSize:
        return TaskSize(size_of_store(Store(path), self.config.data), self._parameters())

    def estimate(self) -> TaskSize:
        """Read the head of the sources."""
        return TaskSize(estimate_size(self.config.data), self._parameters())

    def _parameters(self) -> ParameterCount:
        section = self.config.model.backbone
        self.check_stage(padded=is_padded(section, source_type(section)))
        return self.count_parameters(self.config.model)


def size_of_store(store: Store, data: DataSection) -> DataSize:
    """Count the training part of a store."""
    training, held_out = split_records(store.sequence_hashes, data.validation_share)
    return replace(size_of_lengths(store.lengths[training], data), held_out=held_out.size, counts=store.manifest.counts)


def estimate_size(data: DataSection) -> DataSize:
    """Estimate the size of training on the source, reading no more than the head of the files."""
    if len(data.source) == 1 and (Path(data.source[0]) / MANIFEST_FILE).is_file():
        return size_of_store(Store(data.source[0]), data)
    lengths, share_read = _head_lengths(data)
    head = size_of_lengths(np.array(lengths), data)
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
        return [len(sequence) for _, sequence in sample_records(sample.records, sample.families, sample.seed)], 1.0
    source = FastaSource(data.source)
    lengths: list[int] = []
    for batch in source.batches():
        lengths += map(len, batch.sequences)
        if len(lengths) >= HEAD_RECORDS:
            return lengths, max(source.bytes_read / source.bytes_total, 1e-9)
    return lengths, 1.0


def size_of_lengths(lengths_N: np.ndarray, data: DataSection) -> DataSize:
    """The size of training on records of these lengths (N,), in residues."""
    tokens = cropped_lengths(lengths_N, data.max_length) + SPECIAL_TOKENS_PER_SEQUENCE
    return DataSize(lengths_N.size, int(tokens.sum()), count_cropped(lengths_N, data.max_length), exact=True)
