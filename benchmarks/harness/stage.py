"""Parts of a benchmark: a stage yields rows of a table; rows that compare contenders come from ``comparison.py``.

``Stage.rows`` is a generator, so that each row is on disk before the next is measured. Its ``with`` blocks end
servers also if a row fails.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

REPOSITORY = Path(__file__).resolve().parents[2]
DEVELOPMENT_DATA = REPOSITORY.parent / "shared" / "data"

Device: TypeAlias = Literal["cpu", "cuda"]
Row: TypeAlias = dict[str, str | int | float | None]
"""Values by column. If one of them begins with WRONG, the stage counts as broken."""


class WrongWorkError(Exception):
    """Contenders that should compute the same do not, so comparing their speed means nothing."""


@dataclass(frozen=True)
class Setting:
    """Inputs of a stage, and what it records in addition to its rows.

    Attributes:
        quick: do everything once, on as little work as possible.
        folder: empty; removed afterwards.
        fasta: proteins to work on; None for the default sample.
        vectors: sizes of the indexes of the stage ``index``.
        note: shows one line about the current step.
        facts: whatever a reader needs to know about the measurement; shown below the table.
        samples: every measured value, by case and contender.
    """

    device: Device
    quick: bool
    folder: Path
    fasta: Path | None = None
    vectors: tuple[int, ...] = (100_000, 1_000_000)
    note: Callable[[str], None] = lambda _: None
    facts: Row = field(default_factory=dict)
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One part of the data or model path.

    Attributes:
        packages: import names of the peers.
        distributions: packages whose versions are recorded.
    """

    name: str
    summary: str
    rows: Callable[[Setting], Iterator[Row]]
    packages: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
