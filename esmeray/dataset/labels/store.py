"""A folder of labelled sequences that training reads: sequences or texts, targets, and who is held out.

======================= ==========================================================================================
sequences/              a store (:mod:`esmeray.dataset.store.format`), of residues or of UTF-8
labels.safetensors      targets as ``LabelSpace.encode`` gives them (per-residue letters as
                        int32), or indptr, indices and unknown of sparse ones; parts (N,) uint8 and,
                        where there are weights, weights (N,) float32
label_mappings.json     the label space
labels.json             written last: what the folder was made of and with, checksums, and a checksum of itself
======================= ==========================================================================================

Records that were left out because no training record has their label stay in the store and in no part of it.

Shape legend: N records of the store, R residues of all records end to end, C outputs, L residues of one record.
"""

from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from safetensors.numpy import load_file

from esmeray.common.errors import DataError
from esmeray.common.verification import check_file
from esmeray.dataset.fasta.counts import SourceFile
from esmeray.dataset.labels.label_space import MAPPINGS_FILE, LabelSpace
from esmeray.dataset.labels.labelled_file import LabelledCounts
from esmeray.dataset.store.format import MADE_AGAIN, SEQUENCES_FOLDER, SampleSource, read_signed
from esmeray.dataset.store.reader import Store, stage_once
from esmeray.dataset.targets import SparseTargets

FORMAT_VERSION = 2
LABELS_FILE = "labels.safetensors"
MANIFEST_FILE = "labels.json"

PARTS = ("training", "validation", "test")
LEFT_OUT = len(PARTS)
"""The part of records that are in none."""
_ADVICE = "give the folder of a labelled store, or labelled files"


class LabelledManifest(BaseModel, extra="forbid", frozen=True):
    """``labels.json``: what the folder was made of and with.

    ``sequences_checksum`` is of the store's content, ``files`` has the XXH3-128 of the others, ``checksum`` is the
    identity of sequences and labels.
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
    """Labelled records as a task reads them, wherever their labels come from.

    Attributes: as those of :class:`LabelledStore`; ``path`` is the folder of all that was prepared.
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
        """Records that reading left out or changed."""

    @property
    def checksum(self) -> str:
        """Identity of sequences and labels, hex."""


class LabelledStore:
    """Read access to a labelled store.

    Attributes:
        store: ids and residues, or texts in UTF-8.
        targets: (N,) int64 (multiclass, binary), (N, C) float32 (multilabel, regression), or (R,) int64 (per_residue).
            Those of lists of names are sparse.
        weights: (N,) float32, or None.
        training, validation, test: int64 indices of records, each ascending.
        counts: records that reading, splitting and encoding left out or changed.
        checksum: identity of sequences, labels and parts, hex.
    """

    def __init__(
        self, path: Path | str, verify: Literal["full", "quick"] = "quick", stage_dir: Path | None = None
    ) -> None:
        """Check a labelled store and read its labels, which are verified in full; ``verify`` is of the sequences.

        They are read from ``stage_dir``, a node-local folder, where one is set. Raises DataError for a folder that is
        no labelled store, of another format version, or damaged.
        """
        self.path = Path(path).absolute()
        self.manifest = read_signed(self.path / MANIFEST_FILE, LabelledManifest, MADE_AGAIN, "labelled store", _ADVICE)
        self.counts = self.manifest.counts
        self.checksum = self.manifest.checksum
        sequences = self.path / SEQUENCES_FOLDER
        self.store = Store(sequences if stage_dir is None else stage_once(sequences, stage_dir), verify)
        # A store of its own is copied on its own: labels of other sequences would fit just as well.
        if self.store.checksum != self.manifest.sequences_checksum:
            raise DataError(f"{self.store.path}: not the sequences that {MANIFEST_FILE} was made for; {MADE_AGAIN}")
        for name in (MAPPINGS_FILE, LABELS_FILE):
            check_file(self.path / name, MADE_AGAIN, xxh128=self.manifest.files.get(name, ""))
        self.label_space = LabelSpace.load(self.path)
        tensors = load_file(self.path / LABELS_FILE)
        self.targets: NDArray | SparseTargets
        if "targets" in tensors:
            is_residues = self.label_space.kind == "per_residue"
            # On disk in half the room: of residues there are as many as the store has letters.
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
        """(L,) int64: targets of the residues of one record, a view."""
        start, end = self._residue_offsets[index : index + 2]
        return self.targets[start:end]

    @cached_property
    def _residue_offsets(self) -> list[int]:
        return [0, *np.cumsum(self.store.lengths, dtype=np.int64).tolist()]
