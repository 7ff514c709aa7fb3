"""Folder of protein structures for training: sequences, backbone atoms, confidences, labels, and the held-out part.

======================= ==========================================================================================
sequences/              a store (:mod:`esmeray.dataset.store.format`) of the residues
structures.safetensors  coordinates (R, 4, 3) fp16: N, CA, C, O in Å relative to the mean CA of their record, NaN if
                        unknown, (0, 4, 3) if all are unknown; confidence (R,) fp16, pLDDT, 100 for measured
                        structures; chains (R,) int8; numbers (R,) int32, residue numbers of the files;
                        labels (N,) int64, -1 for none; parts (N,) int8
structures.json         written last: sources and settings of the folder, checksums, and a checksum of itself
======================= ==========================================================================================

This takes 31 bytes per residue. fp16 rounds coordinates by 0.004 Å within 16 Å of the centre, by 0.03 Å beyond 64 Å. A
number is 256 times the residue number, plus the character code of its insertion code (52A), 0 for none. Sequences and
the sample are numbered from 1.

Shape legend: N records of the store, R residues of all records, concatenated, L residues of one record.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from esmeray.common.errors import DataError
from esmeray.dataset.embeddings.arrays import arrays_checksum, open_arrays, write_arrays
from esmeray.dataset.fasta.counts import Counts, SourceFile
from esmeray.dataset.store.format import MADE_AGAIN, SEQUENCES_FOLDER, read_signed
from esmeray.dataset.store.reader import Store
from esmeray.dataset.structures.predictions import PredictedStructures, centred

FORMAT_VERSION = 3
ARRAYS_FILE = "structures.safetensors"
MANIFEST_FILE = "structures.json"
TRAINING, HELD_OUT = 0, 1
_ADVICE = "build one with: esmeray data structures --data.source FOLDER --structures.store STORE"


class StructureCounts(Counts):
    """Counts of reading structure files: kept files and chains, and all changes and omissions."""

    files: int = 0
    chains: int = 0
    predicted: int = Field(default=0, description="structure{s} read as predictions, with B-factors as confidence")
    like_predictions: int = Field(
        default=0,
        description="structure{s} read as experimental although all atoms of a residue share one B-factor, as in "
        "predictions; if they are predictions, set data.structures.predicted to true",
    )
    other_models: int = Field(default=0, description="model{s} after the first ignored")
    short_chains: int = Field(default=0, description="chain{s} with too few residues left out")
    ca_only_chains: int = Field(default=0, description="chain{s} with only CA atoms left out")
    completed_chains: int = Field(default=0, description="chain{s} with only CA atoms completed")
    other_polymers: int = Field(default=0, description="non-protein chain{s} left out")
    modified_residues: int = Field(default=0, description="modified residue{s} read as their parent residue")
    renamed_residues: int = Field(
        default=0, description="residue{s} with a force-field name read as the standard residue"
    )
    unknown_residues: int = Field(default=0, description="residue{s} read as X")
    incomplete_residues: int = Field(
        default=0, description="residue{s} without coordinates because N, CA or C is missing"
    )
    placed_oxygens: int = Field(default=0, description="missing O placed")
    alternate_atoms: int = Field(default=0, description="atom{s} of alternate conformations ignored")
    breaks: int = Field(default=0, description="chain break{s}")


class StructureManifest(BaseModel, extra="forbid", frozen=True):
    """Content of ``structures.json``: source files by setting, settings and checksums of the folder.

    ``label_names`` are the classes in the order of their numbers in ``labels``. ``sequences_checksum`` is the checksum
    of the store's content, ``checksum`` the identity of the whole folder.
    """

    format: Literal["esmeray-structures"] = "esmeray-structures"
    format_version: Literal[3] = 3
    settings: dict[str, Any]
    files: dict[str, list[SourceFile]]
    label_names: list[str]
    sequences_checksum: str
    checksum: str
    counts: StructureCounts
    created: str


@dataclass(frozen=True)
class Structure:
    """One chain, or all chains of a complex, concatenated.

    Attributes:
        coordinates: (L, 4, 3) float32, N, CA, C, O in Å; NaN if unknown.
        confidence: (L,) float16, 0 to 100.
        chains: (L,) int8, number of each residue's chain, from 0.
        numbers: (L,) int32, :func:`packed_number` of each residue; None for residues numbered from 1.
    """

    id: str
    residues: str
    coordinates: NDArray[np.float32]
    confidence: NDArray[np.float16]
    chains: NDArray[np.int8]
    chain_names: tuple[str, ...]
    numbers: NDArray[np.int32] | None = None

    @property
    def packed_numbers(self) -> NDArray[np.int32]:
        """(L,) :attr:`numbers`, or packed 1, 2, 3 ... if there are none."""
        return np.arange(1, len(self.residues) + 1, dtype=np.int32) * 256 if self.numbers is None else self.numbers

    @property
    def residue_labels(self) -> list[str]:
        """Residue numbers of the file with insertion codes, e.g. 52A."""
        return list(map(residue_label, self.packed_numbers.tolist()))

    @classmethod
    def unknown(cls, record: str, residues: str) -> "Structure":
        """Return a chain whose residues are known and whose coordinates are not."""
        # A broadcast view of one NaN: a store may have millions of sequences without structures.
        nothing = np.broadcast_to(np.float32(np.nan), (len(residues), 4, 3))
        length = len(residues)
        return cls(record, residues, nothing, np.zeros(length, np.float16), np.zeros(length, np.int8), ("A",))


def packed_number(number: int, insertion_code: str) -> int:
    """Return a residue number with its insertion code (empty for none) as one number that sorts by both."""
    return 256 * number + ord(insertion_code.encode("latin-1") or b"\0")


def residue_label(packed: int) -> str:
    """Return the text of a :func:`packed_number`, e.g. 52A."""
    number, insertion_code = divmod(packed, 256)
    return f"{number}{chr(insertion_code)}" if insertion_code else str(number)


def chain_positions(packed_L: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return (L,) ascending positions of residues with these packed numbers.

    A missing residue takes a position, and so does an insertion: 52, 52A and 55 are at 0, 1 and 4.
    """
    # Numbers may start again with a chain, or fall within one: the next residue then counts as adjacent.
    steps_L = np.diff(packed_L.astype(np.int64) // 256, prepend=0).clip(min=1)
    return np.cumsum(steps_L) - steps_L[:1]


class StructureStore:
    """Read access to a structure store.

    Attributes:
        labels: (N,) int64, -1 for none.
        training, validation: int64 indices of records, each ascending.
        unknown_records: indices of records without a structure in the store.
    """

    def __init__(
        self,
        path: Path | str,
        verify: Literal["full", "quick"] = "quick",
        *,
        sequences: Path | None = None,
        predictions: PredictedStructures | None = None,
    ) -> None:
        """Open the folder, or its sequences from a copy. ``predictions`` are for records without a structure.

        Raises DataError if the folder is not a structure store or is damaged.
        """
        self.path = Path(path).absolute()
        self.manifest = read_signed(
            self.path / MANIFEST_FILE, StructureManifest, MADE_AGAIN, "structure store", _ADVICE
        )
        self.store = Store(sequences or self.path / SEQUENCES_FOLDER, verify)
        if self.store.checksum != self.manifest.sequences_checksum:
            raise DataError(
                f"{self.store.path}: its sequences are not the ones that {MANIFEST_FILE} was built for; {MADE_AGAIN}"
            )
        arrays = open_arrays(self.path / ARRAYS_FILE)
        # Unlike blocks in LMDB, which are checked when read, these small arrays are checked once, here.
        if arrays_checksum(self.manifest.sequences_checksum, arrays) != self.manifest.checksum:
            raise DataError(f"{self.path / ARRAYS_FILE}: damaged: checksum mismatch; {MADE_AGAIN}")
        self._arrays: dict[str, NDArray] = arrays
        self.labels: NDArray[np.int64] = arrays["labels"]
        self.training, self.validation = (np.flatnonzero(arrays["parts"] == code) for code in (TRAINING, HELD_OUT))
        self._starts = np.cumsum(self.store.lengths, dtype=np.int64) - self.store.lengths
        self._predictions = predictions
        # Computed once, because every batch needs it.
        self._unknown_N = np.ones(len(self.store), dtype=bool)
        if len(self._arrays["coordinates"]):
            self._unknown_N = ~np.logical_or.reduceat(np.isfinite(self._arrays["coordinates"][:, 1, 0]), self._starts)
        self.unknown_records = np.flatnonzero(self._unknown_N)

    def __len__(self) -> int:
        return len(self.store)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Pickle the paths, so that another process maps the files itself."""
        return partial(StructureStore, self.path, sequences=self.store.path, predictions=self._predictions), ()

    def atoms(self, record: int, start: int, length: int) -> tuple[NDArray[np.float16], NDArray, NDArray]:
        """Return (length, 4, 3) coordinates, (length,) confidence and (length,) chains of some residues of a record."""
        first = int(self._starts[record]) + start
        rows = slice(first, first + length)
        chains = self._arrays["chains"][rows]
        if not self._unknown_N[record]:
            return self._arrays["coordinates"][rows], self._arrays["confidence"][rows], chains
        if self._predictions is not None:
            key_12 = self.store.sequence_keys(np.array([record]))
            predicted = self._predictions.of(key_12, int(self.store.lengths[record]))
            # None until it is predicted; the sequence is then trained on without a structure.
            if predicted is not None:
                own_rows = slice(start, start + length)
                return predicted.coordinates[own_rows], predicted.confidence[own_rows], chains
        return np.full((length, 4, 3), np.nan, np.float16), self._arrays["confidence"][rows], chains

    def numbers(self, record: int, start: int, length: int) -> NDArray[np.int32]:
        """Return (length,) :func:`packed_number` of some residues of a record."""
        first = int(self._starts[record]) + start
        return self._arrays["numbers"][first : first + length]

    def structure(self, record: int) -> Structure:
        residues = self.store.text(record)
        atoms, confidence, chains = self.atoms(record, 0, len(residues))
        # A store has numbers of chains, not the names in the files.
        names = tuple(map(str, range(int(chains.max(initial=0)) + 1)))
        numbers = self.numbers(record, 0, len(residues))
        return Structure(self.store.id(record), residues, atoms.astype(np.float32), confidence, chains, names, numbers)


def write_structures(folder: Path, structures: list[Structure], labels_N: NDArray, parts_N: NDArray) -> None:
    """Write ``structures.safetensors`` for the store's records, in their order."""
    # Without any structure, no coordinates are written: they would be 24 bytes of NaN per residue.
    known = any(np.isfinite(structure.coordinates[:, 1, 0]).any() for structure in structures)
    coordinates = [centred(structure.coordinates) for structure in structures if known]
    write_arrays(
        folder / ARRAYS_FILE,
        {
            "coordinates": np.concatenate([np.empty((0, 4, 3), np.float16), *coordinates]),
            "confidence": np.concatenate([structure.confidence for structure in structures]).astype(np.float16),
            "chains": np.concatenate([structure.chains for structure in structures]).astype(np.int8),
            "numbers": np.concatenate([structure.packed_numbers for structure in structures]),
            "labels": labels_N.astype(np.int64),
            "parts": parts_N.astype(np.int8),
        },
    )
