"""Parts of a benchmark: a stage has cases, a case has contenders that do the same work, and comparisons.

``Stage.cases`` is a generator: what stands before a ``yield`` sets a case up, what stands after it
takes it down, and the runner (:mod:`benchmarks.harness.runner`) measures in between. Everything is a ratio,
better when it is larger; ``Stage.comparisons`` has the ratio that is enough on each device. A stage that compares with
no peer yields rows of values that it took itself.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from esmeray.common.errors import ConfigError
from esmeray.common.text import did_you_mean

REPOSITORY = Path(__file__).resolve().parents[2]

Device: TypeAlias = Literal["cpu", "cuda"]
Facts: TypeAlias = dict[str, float | int | str | bool]
Row: TypeAlias = dict[str, str | int | float | None]
"""Values by column; where one of them begins with WRONG, the stage counts as broken."""


def check_names(kind: str, names: Collection[str], known: Collection[str]) -> None:
    """Refuse the first name that is not known by a ConfigError that has all that are."""
    for name in names:
        if name not in known:
            raise ConfigError(f"no {kind} is called {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")


class WrongWorkError(Exception):
    """Contenders that should compute the same do not, so that comparing their speed means nothing."""


@dataclass(frozen=True)
class Setting:
    """Inputs that a run gives to each stage.

    ``quick``: everything once, on as little work as shows that it works. ``folder``: empty, removed afterwards.
    ``fasta``: proteins to work on; None for those at hand. ``vectors``: numbers of those of which indexes are made.
    ``note`` shows one line of what is being prepared.
    """

    device: Device
    quick: bool
    folder: Path
    fasta: Path | None = None
    vectors: tuple[int, ...] = (100_000, 1_000_000)
    note: Callable[[str], None] = lambda _: None  # a smoke test calls a stage without a terminal


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a case.

    Attributes:
        run: does the work once. Of a ``rate``, returns how much real work was done (tokens, sequences, bytes; never
            padded ones) and is timed; of a ``value``, returns the measured value itself and is not warmed up.
        short: a shorter piece of the same work for warming up; ``run`` where it is left out.
        before: done before each ``run`` and not timed (removing what the last one wrote).
    """

    name: str
    run: Callable[[], float]
    kind: Literal["rate", "value"] = "rate"
    short: Callable[[], float] | None = None
    before: Callable[[], object] | None = None


@dataclass(frozen=True)
class Case:
    """Contenders that take part on this device, measured in turns, round by round.

    ``check`` is called before anything is measured: it compares what they compute, and returns by how much it differs.
    ``facts``: whatever a reader needs to know of this case; may be filled while it runs.
    """

    name: str
    unit: str
    contenders: tuple[Contender, ...]
    better: Literal["higher", "lower"] = "higher"
    rounds: int = 5
    check: Callable[[], Facts] | None = None
    facts: Facts = field(default_factory=dict)  # some are known only when a contender has run


@dataclass(frozen=True)
class Reference:
    """A number to compare with where there is no peer, in the case's unit."""

    label: str
    value: float


@dataclass(frozen=True)
class Comparison:
    """One row of the table: our contender beside another of the case, or a fixed number.

    ``floors`` are the least ratios to reach, by device; ``label`` is what is compared, where the case's name doesn't
    say it.
    """

    case: str
    ours: str
    peer: str | Reference
    floors: Mapping[Device, float] = field(default_factory=dict)
    label: str = ""

    @property
    def title(self) -> str:
        return self.label or self.case

    @property
    def peer_name(self) -> str:
        return self.peer.label if isinstance(self.peer, Reference) else self.peer


@dataclass(frozen=True)
class Stage:
    """One part of the data or model path, beside what people use for it today.

    ``cases`` yields those that make sense on the device, or rows; each is measured before the next is asked for.
    ``packages``: import names of the peers. ``distributions``: packages whose versions are recorded.
    """

    name: str
    summary: str
    cases: Callable[[Setting], Iterator[Case | Row]]
    comparisons: tuple[Comparison, ...] = ()
    packages: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
