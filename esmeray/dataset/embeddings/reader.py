"""Read embeddings: ids, and vectors by id, number or slice, for all outputs and formats.

Arrays are fp32, whatever dtype is stored. .npy and safetensors are memory-mapped; Parquet is decoded one row group at a
time. From a URI only the requested rows (or their Parquet row groups) and the index are fetched. The state is a
snapshot: parts that are added after opening are not seen.

Shape legend: N records, C channels, L residues of a record.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import ConfigError, DataError, UnknownRecordError, did_you_mean, parsing
from esmeray.common.remote import Returned, retried
from esmeray.dataset.embeddings.formats.base import Rows, Values
from esmeray.dataset.embeddings.formats.registry import FORMATS
from esmeray.dataset.embeddings.manifest import (
    INDEX_FILE,
    MANIFEST_FILE,
    REMEDY,
    Index,
    OutputManifest,
    Part,
    ranges,
)


def read_embeddings(folder: Path | str, output: str | None = None) -> "Embeddings":
    """Open an output of a folder or a URI, by default its first.

    Raises DataError for damaged files, ConfigError for an unknown output, ResourceError if a URI is unreachable.
    >>> vectors = esmeray.read_embeddings("vectors")
    >>> len(vectors), vectors["first"].shape, vectors[0:2].shape
    (3, (320,), (2, 320))
    """
    return Embeddings(folder, output)


def open_vectors(folder: Path | str, output: str | None = None) -> "Embeddings":
    """Open an output with one vector per protein; raises DataError for other outputs. See :func:`read_embeddings`."""
    embeddings = read_embeddings(folder, output)
    if embeddings.output.per != "protein":
        raise DataError(
            f"{folder}: output {embeddings.name!r} has values per {embeddings.output.per}; choose one with a "
            "vector per protein, e.g. mean"
        )
    return embeddings


class Comparable(Protocol):
    """Vectors of one output: embeddings, or an index of embeddings."""

    folder: Path
    source: Path | str
    name: str
    channels: int
    manifest: Any


class Embeddings(Index):
    """Embeddings of N records in input order.

    ``embeddings[id]`` or ``embeddings[number]`` is the array of one record: (C,) for one vector per protein, (L, C) for
    one per residue, (L, L) for contacts. ``embeddings[start:stop]`` is (n, C), or a list of arrays. Unknown ids and
    numbers beyond the end raise UnknownRecordError, which is both a KeyError and an IndexError.
    """

    def __init__(self, source: Path | str, output: str | None) -> None:
        super().__init__(source)
        known = list(self.manifest.outputs)
        self.name = known[0] if output is None else output
        if self.name not in self.manifest.outputs:
            hint = did_you_mean(str(self.name), known)
            raise ConfigError(f"{self.source}: no output {self.name!r}{hint}; available: {', '.join(known)}")
        self.output: OutputManifest = self.manifest.outputs[self.name]
        self.channels = self.output.channels
        self.release()
        # (P+1,) index of the first record of each of P parts, then the number of records.
        self._bounds = np.cumsum([0, *(part.num_records for part in self.parts)])

    def release(self) -> None:
        """Reopen the files. Pages that were read from a mapped file count as memory of the process until then."""
        self._rows = [self._opened(part) for part in self.parts]

    def _opened(self, part: Part) -> Rows:
        """Open the output of one part."""
        folder = part.where("")
        output = part.manifest.outputs.get(self.name)
        if output is None or (output.channels, output.per) != (self.channels, self.output.per):
            raise DataError(f"{folder}: damaged: output {self.name!r} of {self.source} is missing; {REMEDY}")
        if not output.files:
            raise DataError(f"{folder}: output {self.name!r} lists no files; {REMEDY}")
        # Check now, so that a search fails early with one line. At a URI, files are checked when they are opened.
        missing = [name for name in [INDEX_FILE, *output.files] if not (part.folder / name).is_file()]
        if missing and part.uri is None:
            raise DataError(f"{folder}: damaged: {missing[0]} is missing; {REMEDY}")
        if output.format not in FORMATS:
            known = f"supported formats: {', '.join(FORMATS)}{did_you_mean(output.format, ())}"
            raise DataError(f"{folder}: output {self.name!r} has the unknown format {output.format!r}; {known}")
        return self._patiently(lambda: FORMATS[output.format].read(output, part))

    def _patiently(self, read: Callable[[], Returned]) -> Returned:
        """Return what ``read`` returns. At a URI, retry for a while if the URI is unreachable."""
        return read() if isinstance(self.source, Path) else retried(read, self.source)

    def __len__(self) -> int:
        return self.num_records

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise ConfigError(f"{self.source}: slices with a step are not supported; read all records, then select")
            return self._slice(start, max(start, stop))
        try:  # range handles negative numbers
            number = self.numbers[key] if isinstance(key, str) else range(len(self))[key]
        except (KeyError, IndexError, TypeError):
            raise UnknownRecordError(f"{self.source}: no record {key!r} (it has {len(self):,} records)") from None
        part = int(np.searchsorted(self._bounds, number, side="right")) - 1
        return self._patiently(lambda: self._rows[part].row(number - int(self._bounds[part])))

    def _slice(self, start: int, stop: int) -> Any:
        """Return records that may span parts: (n, C), or a list of arrays."""
        pieces = []
        for rows, first, end in zip(self._rows, self._bounds[:-1].tolist(), self._bounds[1:].tolist(), strict=True):
            if start < end and stop > first:
                pieces.append(self._patiently(partial(rows.rows, max(start, first) - first, min(stop, end) - first)))
        if len(pieces) < 2:  # an empty slice still needs the dtype and channels of its rows
            return pieces[0] if pieces else self._rows[0].rows(0, 0)
        return np.concatenate(pieces) if self.output.per == "protein" else list(chain.from_iterable(pieces))

    def __iter__(self) -> Iterator[Values]:
        return (self[number] for number in range(len(self)))

    def blocks(self, rows: int = 16_384) -> Iterator[tuple[int, Any]]:
        """Yield blocks of vectors: the number of the first record, and (n, C)."""
        return ((start, self[start:stop]) for start, stop in ranges(len(self), rows))

    def finite_blocks(self, rows: int = 16_384) -> Iterator[tuple[int, Values]]:
        """Yield :meth:`blocks`; raises DataError if a vector has NaN or infinity."""
        for start, block_nC in self.blocks(rows):
            self.refuse(start, ~np.isfinite(block_nC).all(axis=1), "has NaN or infinity")
            yield start, block_nC

    def refuse_other_space(self, other: Comparable) -> None:
        """Raise DataError if the vectors of self and other are not comparable (other model, pooling or layer)."""
        if self.channels != other.channels:
            raise DataError(
                f"{self.source} has {self.channels:,} channels, but {other.source} has {other.channels:,}; give "
                "embeddings of the same model"
            )
        spaces = []
        sources: list[Comparable] = [self, other]
        for source in sources:
            with parsing(source.folder / MANIFEST_FILE, REMEDY):
                spaces.append(source.manifest.space(source.name))
        # Without a fingerprint, e.g. from another program, spaces can't be compared.
        if None not in spaces and spaces[0] != spaces[1]:
            raise DataError(
                f"{self.source} has vectors of model {spaces[0]}, but {other.source} of model {spaces[1]}, "
                "which are not comparable; give embeddings of the same model, pooling and layer"
            )

    def refuse(self, start: int, wrong_n: NDArray[np.bool_], problem: str) -> None:
        """Raise DataError with the id of the first wrong record, if any; ``wrong_n`` begins at record ``start``."""
        if wrong_n.any():
            raise DataError(f"{self.source}: {self.ids[start + int(wrong_n.argmax())]!r} {problem} in {self.name}")

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Number of each record by id."""
        return {record_id: number for number, record_id in enumerate(self.ids)}
