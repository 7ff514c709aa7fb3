"""Folder of labelled sequences for training: sequences or texts, targets, and the split into parts.

======================= ==========================================================================================
sequences/              a store (:mod:`esmeray.dataset.store.format`), of residues or of UTF-8
labels.safetensors      targets as returned by ``LabelSpace.encode`` (per-residue letters as int32), or, if sparse,
                        indptr, indices and unknown; parts (N,) uint8; in stores of earlier versions maybe
                        weights (N,) float32
label_mappings.json     the label space
labels.json             written last: sources and settings of the folder, checksums, and a checksum of itself
======================= ==========================================================================================

Records whose label no training record has stay in the store, but belong to no part.

Shape legend: N records of the store, R residues of all records, concatenated, C outputs, L residues of one record.
"""

from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from safetensors.numpy import load_file

from esmeray.common.errors import DataError
from esmeray.common.publishing import check_file
from esmeray.dataset.fasta.counts import SourceFile
from esmeray.dataset.labels.labelled_file import LabelledCounts
from esmeray.dataset.store.format import MADE_AGAIN, SEQUENCES_FOLDER, SampleSource, read_signed
from esmeray.dataset.store.reader import Store, stage_once
from esmeray.dataset.targets import MAPPINGS_FILE, LabelSpace, SparseTargets

FORMAT_VERSION = 2
LABELS_FILE = "labels.safetensors"
MANIFEST_FILE = "labels.json"

PARTS = ("training", "validation", "test")
LEFT_OUT = len(PARTS)
"""Code for records that belong to no part."""
_ADVICE = "give a labelled store or labelled files"


class LabelledManifest(BaseModel, extra="forbid", frozen=True):
    """Content of ``labels.json``: sources, settings and checksums of the folder.

    ``sequences_checksum`` is the checksum of the store's content, ``files`` has the XXH3-128 of the other files, and
    ``checksum`` is the identity of sequences and labels.
    """

    format: Literal["esmeray-labels"] = "esmeray-labels"
    format_version: Literal[2] = 2
    num_records: int
    settings: dict[str, Any]
    source: list[SourceFile] | SampleSource
    held_out_source: list[SourceFile]
    labels_source: list[SourceFile]
    sequences_checksum: str
    files: dict[str, str]
    checksum: str
    counts: LabelledCounts
    created: str


class LabelledData(Protocol):
    """Labelled records as a task reads them, independent of the source of their labels.

    Attributes: see :class:`LabelledStore`; ``path`` is the folder of all prepared files.
    """

    path: Path
    store: Store
    label_space: LabelSpace
    targets: Any
    weights: NDArray[np.float32] | None
    training: NDArray[np.int64]
    validation: NDArray[np.int64]

    @property
    def counts(self) -> Any:
        """Counts of records that reading left out or changed."""

    @property
    def checksum(self) -> str:
        """Hex identity of sequences and labels."""


class LabelledStore:
    """Read access to a labelled store.

    Attributes:
        store: ids and residues, or texts in UTF-8.
        targets: (N,) int64 (multiclass, binary), (N, C) float32 (multilabel, regression), or (R,) int64 (per_residue).
            Targets from lists of names are sparse.
        weights: (N,) float32, or None.
        training, validation, test: int64 indices of records, each ascending.
        counts: counts of records that reading, splitting and encoding left out or changed.
        checksum: hex identity of sequences, labels and parts.
    """

    def __init__(
        self, path: Path | str, verify: Literal["full", "quick"] = "quick", stage_dir: Path | None = None
    ) -> None:
        """Check a labelled store and read its labels. Labels are verified in full, sequences according to ``verify``.

        If ``stage_dir`` (a node-local folder) is set, sequences are copied to it and read from there. Raises DataError
        if the folder is not a labelled store, is damaged or of another format version.
        """
        self.path = Path(path).absolute()
        self.manifest = read_signed(self.path / MANIFEST_FILE, LabelledManifest, MADE_AGAIN, "labelled store", _ADVICE)
        self.counts = self.manifest.counts
        self.checksum = self.manifest.checksum
        sequences = self.path / SEQUENCES_FOLDER
        self.store = Store(sequences if stage_dir is None else stage_once(sequences, stage_dir), verify)
        # The sequences may have been copied separately; labels of other sequences could match in shape.
        if self.store.checksum != self.manifest.sequences_checksum:
            raise DataError(
                f"{self.store.path}: its sequences are not the ones that {MANIFEST_FILE} was built for; {MADE_AGAIN}"
            )
        for name in (MAPPINGS_FILE, LABELS_FILE):
            check_file(self.path / name, MADE_AGAIN, xxh128=self.manifest.files.get(name, ""))
        self.label_space = LabelSpace.load(self.path)
        tensors = load_file(self.path / LABELS_FILE)
        self.targets: NDArray | SparseTargets
        if "targets" in tensors:
            is_residues = self.label_space.kind == "per_residue"
            # int32 on disk, to halve the size: there is one target per residue.
            self.targets = tensors["targets"].astype(np.int64) if is_residues else tensors["targets"]
        else:
            rows = tensors["indptr"], tensors["indices"], tensors["unknown"][:, None]
            self.targets = SparseTargets(*rows, np.zeros(self.label_space.num_outputs, np.int64))
        self.weights: NDArray[np.float32] | None = tensors.get("weights")
        self.training, self.validation, self.test = (
            np.flatnonzero(tensors["parts"] == code) for code in range(len(PARTS))
        )

    def __len__(self) -> int:
        return len(self.store)

    def residue_targets(self, index: int) -> NDArray[np.int64]:
        """Return the (L,) int64 targets of one record's residues, as a view."""
        start, end = self._residue_offsets[index : index + 2]
        return self.targets[start:end]

    @cached_property
    def _residue_offsets(self) -> list[int]:
        return [0, *np.cumsum(self.store.lengths, dtype=np.int64).tolist()]
