"""Records that are refused, gathered in one pass, so that a file can be mended in one go.

When reading has ended, one :class:`~common.errors.DataError` names how many faults of which kinds there are, and the
first few with their places, which are looked up then, in one pass over each file.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.errors import DataError
from common.text import counted
from dataset.fasta.locate import places_of_records
from dataset.fasta.reader import RecordBatch

SHOWN = 10
"""Faults that are shown with their places; all are counted."""

PlacesOfIds = Callable[[set[str]], dict[str, str]]
"""Gives the places of the first records with these ids."""


@dataclass(frozen=True)
class Fault:
    """One refused record.

    Attributes:
        problem: what is wrong, and what to do; of a repeated id what to do.
        residue: which of its letters is meant, if any.
        repeats: the id, where another record had it before.
    """

    batch: RecordBatch
    index: int
    problem: str
    residue: int | None = None
    repeats: str | None = None


class Faults:
    """Records refused so far; true when there are some."""

    def __init__(self, places_of_ids: PlacesOfIds) -> None:
        self._places_of_ids = places_of_ids
        self._counts: Counter[str] = Counter()
        self._first: list[Fault] = []

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, kind: str, fault: Fault) -> None:
        """Count a fault, its kind a noun for :func:`~common.text.counted`, and keep it if it is among the first."""
        self._counts[kind] += 1
        if len(self._first) < SHOWN:
            self._first.append(fault)

    @contextmanager
    def raised_at_end(self) -> Iterator[None]:
        """Raise all faults as one DataError when the block ends, with the one that ended it if there was one."""
        try:
            yield
        except DataError as error:
            if self:
                raise DataError(*self._lines(*error.problems)) from error
            raise
        if self:
            raise DataError(*self._lines())

    def _lines(self, *ended_by: str) -> list[str]:
        number = self._counts.total() + len(ended_by)
        lines = [*self._placed(), *ended_by]
        if number == 1:
            return lines
        kinds = [counted(count, kind) for kind, count in self._counts.most_common()]
        kinds += [f"{counted(len(ended_by), 'fault{s}')} that ended the reading"] if ended_by else []
        shown = "" if len(lines) == number else f"; the first {len(lines) - len(ended_by)}"
        return [f"{number:,} faults: {', '.join(kinds)}{shown}", *lines]

    def _placed(self) -> list[str]:
        numbers = {id(fault.batch): number for number, fault in reversed(list(enumerate(self._first)))}
        first = sorted(self._first, key=lambda fault: (numbers[id(fault.batch)], fault.index))
        origins = [fault.batch.origin(fault.index) for fault in first]
        wanted: defaultdict[Path, list[tuple[int, int | None]]] = defaultdict(list)
        for origin, fault in zip(origins, first, strict=True):
            if origin is not None:
                wanted[origin[0]].append((origin[1], fault.residue))
        places = {path: iter(places_of_records(path, records)) for path, records in wanted.items()}
        repeated = {fault.repeats for fault in first if fault.repeats is not None}
        before = self._places_of_ids(repeated) if repeated else {}
        lines = []
        for origin, fault in zip(origins, first, strict=True):
            place = next(places[origin[0]]) if origin else fault.batch.place(fault.index, fault.residue)
            if fault.repeats is not None:
                first_place = before.get(fault.repeats, "an earlier record")
                lines.append(f"{place}: the id {fault.repeats!r} stands already in {first_place}; {fault.problem}")
            else:
                lines.append(f"{place}: {fault.problem}")
        return lines
