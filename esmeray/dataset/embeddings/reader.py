"""Embeddings opened for reading: ids, and vectors by id, number or slice, of any output and format.

Arrays are fp32 whatever is stored. .npy and safetensors are memory-mapped; of Parquet a row group is decoded at a time.
At a URI the rows are fetched that are asked for (of Parquet their row groups), beside the index. The state is that of
the moment of opening: parts that are added later are not seen.

Shape legend: N records, C channels, L residues of a record.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import ConfigError, DataError, UnknownRecordError, check_path, parsing
from esmeray.common.remote import Returned, retried
from esmeray.common.text import did_you_mean
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

    Raises DataError for damage, ConfigError for an unknown output, ResourceError for a store that is away.

    >>> vectors = esmeray.read_embeddings("vectors")
    >>> len(vectors), vectors["first"].shape, vectors[0:2].shape
    (3, (320,), (2, 320))
    """
    check_path(folder, "folder")
    return Embeddings(folder, output)


def open_vectors(folder: Path | str, output: str | None = None) -> "Embeddings":
    """:func:`read_embeddings` for an output with one vector a protein; raises DataError for any other."""
    embeddings = read_embeddings(folder, output)
    if embeddings.output.per != "protein":
        raise DataError(
            f"{folder}: output {embeddings.name!r} has values for each {embeddings.output.per}; name one with one "
            "vector a protein, such as mean"
        )
    return embeddings


class Comparable(Protocol):
    """Vectors of one output: embeddings, or an index of them."""

    folder: Path
    source: Path | str
    name: str
    channels: int
    manifest: Any


class Embeddings(Index):
    """Embeddings of N records, in the order of the input.

    ``embeddings[id]`` or ``embeddings[number]`` is a record's: (C,) where the output has one vector a protein, (L, C)
    where it has one a residue, (L, L) for contacts. ``embeddings[start:stop]`` is (n, C), or a list of arrays. Unknown
    ids and numbers beyond the end raise UnknownRecordError, which is a KeyError and an IndexError, too.
    """

    def __init__(self, source: Path | str, output: str | None) -> None:
        super().__init__(source)
        known = list(self.manifest.outputs)
        self.name = known[0] if output is None else output
        if self.name not in self.manifest.outputs:
            hint = did_you_mean(str(self.name), known)
            raise ConfigError(f"{self.source}: no output {self.name!r}{hint}; there are {', '.join(known)}")
        self.output: OutputManifest = self.manifest.outputs[self.name]
        self.channels = self.output.channels
        self.release()
        # (P+1,) number of the first record of each part, and of all records.
        self._bounds = np.cumsum([0, *(part.num_records for part in self.parts)])

    def release(self) -> None:
        """Open the files anew: what was read of a mapped one counts as memory of the process until then."""
        self._rows = [self._opened(part) for part in self.parts]

    def _opened(self, part: Part) -> Rows:
        """The output of one part."""
        folder = part.where("")
        output = part.manifest.outputs.get(self.name)
        if output is None or (output.channels, output.per) != (self.channels, self.output.per):
            raise DataError(f"{folder}: damaged: has no output {self.name!r} as {self.source}; {REMEDY}")
        if not output.files:
            raise DataError(f"{folder}: output {self.name!r} names no file; {REMEDY}")
        # In one line here, and not as a traceback in the middle of a search; at a URI where it is opened.
        missing = [name for name in [INDEX_FILE, *output.files] if not (part.folder / name).is_file()]
        if missing and part.uri is None:
            raise DataError(f"{folder}: damaged: {missing[0]} is missing; {REMEDY}")
        if output.format not in FORMATS:
            known = f"{', '.join(FORMATS)} are read{did_you_mean(output.format, ())}"
            raise DataError(f"{folder}: output {self.name!r} is {output.format}; {known}")
        return self._patiently(lambda: FORMATS[output.format].read(output, part))

    def _patiently(self, read: Callable[[], Returned]) -> Returned:
        """Return what is read; from a URI again where the store is away, for a while."""
        return read() if isinstance(self.source, Path) else retried(read, self.source)

    def __len__(self) -> int:
        return self.num_records

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise ConfigError(f"{self.source}: a slice has no step; take every record, then some of them")
            return self._slice(start, max(start, stop))
        try:  # range knows numbers from the end
            number = self.numbers[key] if isinstance(key, str) else range(len(self))[key]
        except (KeyError, IndexError, TypeError):
            raise UnknownRecordError(f"{self.source}: has no record {key!r} among its {len(self):,}") from None
        part = int(np.searchsorted(self._bounds, number, side="right")) - 1
        return self._patiently(lambda: self._rows[part].row(number - int(self._bounds[part])))

    def _slice(self, start: int, stop: int) -> Any:
        """Records of any number of parts: (n, C), or a list of arrays."""
        pieces = []
        for rows, first, end in zip(self._rows, self._bounds[:-1].tolist(), self._bounds[1:].tolist(), strict=True):
            if start < end and stop > first:
                pieces.append(self._patiently(partial(rows.rows, max(start, first) - first, min(stop, end) - first)))
        if len(pieces) < 2:  # an empty slice, too, has the dtype and the channels of its rows
            return pieces[0] if pieces else self._rows[0].rows(0, 0)
        return np.concatenate(pieces) if self.output.per == "protein" else list(chain.from_iterable(pieces))

    def __iter__(self) -> Iterator[Values]:
        return (self[number] for number in range(len(self)))

    def blocks(self, rows: int = 16_384) -> Iterator[tuple[int, Any]]:
        """The number of its first record, and the vectors (n, C), of one part after the other."""
        return ((start, self[start:stop]) for start, stop in ranges(len(self), rows))

    def finite_blocks(self, rows: int = 16_384) -> Iterator[tuple[int, Values]]:
        """:meth:`blocks` of vectors; raises DataError where one has NaN or infinity."""
        for start, block_nC in self.blocks(rows):
            self.refuse(start, ~np.isfinite(block_nC).all(axis=1), "has NaN or infinity")
            yield start, block_nC

    def refuse_other_space(self, other: Comparable) -> None:
        """Raise DataError where vectors of these and the other can't be compared: by model, pooling or layer."""
        if self.channels != other.channels:
            raise DataError(
                f"{self.source} has {self.channels:,} channels, {other.source} {other.channels:,}; give embeddings of "
                "the same model"
            )
        spaces = []
        sources: list[Comparable] = [self, other]
        for source in sources:
            with parsing(source.folder / MANIFEST_FILE, REMEDY):
                spaces.append(source.manifest.space(source.name))
        # Where a maker left no fingerprint, as another program, nothing can be said against it.
        if None not in spaces and spaces[0] != spaces[1]:
            raise DataError(
                f"{self.source} has vectors of model {spaces[0]}, {other.source} of model {spaces[1]}, which can't be "
                "compared; give embeddings of the same model, pooling and layer"
            )

    def refuse(self, start: int, wrong_n: NDArray[np.bool_], problem: str) -> None:
        """Raise DataError with the id of the first wrong one of n records that begin with record ``start``."""
        if wrong_n.any():
            raise DataError(f"{self.source}: {self.ids[start + int(wrong_n.argmax())]!r} {problem} in {self.name}")

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Number of each record by its id."""
        return {record_id: number for number, record_id in enumerate(self.ids)}
