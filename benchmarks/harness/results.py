"""The measurements in ``results.json``: every sample, with what is needed to judge or repeat it.

A run adds the cases that it measured and replaces those of the same stage and name; the others stay with their own
date, command, versions and revision. So a stage can be measured again without the rest.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel, ValidationError

from benchmarks.harness.machine import Machine
from benchmarks.harness.stage import Case, Comparison, Device, Facts, Reference, Row
from esmeray.common.errors import DataError
from esmeray.common.timing import AGREEMENT, MAX_MEDIANS, REPEATS_PER_MEDIAN, Ratio, ratio, round_ratios

RESULTS_FILE = "results.json"
WARM_UP_PROTOCOL = (
    f"medians of {REPEATS_PER_MEDIAN} repeats until two in a row agree within {AGREEMENT:.0%}, at most {MAX_MEDIANS}; "
    "then all contenders in turns, round by round"
)
NO_WARM_UP = "none: a smoke run"

Verdict: TypeAlias = Literal["reached", "reached, within noise", "missed, within noise", "missed", "no floor"]


class ContenderResult(BaseModel):
    """Samples of one contender, in the case's unit; whether its warm-up became steady, None without one."""

    name: str
    samples: list[float]
    median: float
    warm_up_settled: bool | None


class ComparisonResult(BaseModel):
    """A row of the table: the ratios of all rounds, their median and its interval, larger where ours is better."""

    title: str
    ours: str
    peer: str
    ratios: list[float]
    ratio: float
    low: float
    high: float
    floor: float | None
    verdict: Verdict


class Origin(BaseModel):
    """When, how and with what something of a stage was measured."""

    date: str
    command: str
    revision: str
    versions: dict[str, str]
    warm_up: str
    stage: str


class CaseResult(Origin):
    """A case and how it was measured."""

    case: str
    device: Device
    unit: str
    better: Literal["higher", "lower"]
    contenders: list[ContenderResult]
    comparisons: list[ComparisonResult]
    facts: Facts


class Table(Origin):
    """Rows of a stage that compares with no peer; ``seconds`` that they took so far."""

    summary: str
    seconds: float
    rows: list[Row]


class Results(BaseModel):
    """All that was measured on one machine."""

    format_version: Literal[1] = 1
    machine: Machine
    cases: list[CaseResult] = []
    tables: list[Table] = []

    @property
    def smoke(self) -> bool:
        """True where any of it is of a smoke run."""
        return any(case.warm_up == NO_WARM_UP for case in self.cases)


def merged(results: Results, fresh: CaseResult | Table, order: Sequence[str]) -> Results:
    """The results with this case or table replaced or added, in the order of the stages' names."""
    kind = "tables" if isinstance(fresh, Table) else "cases"
    # A later record replaces one of the same key and takes its position among the cases of the stage.
    records = {(record.stage, getattr(record, "case", "")): record for record in [*getattr(results, kind), fresh]}
    # Stages that are gone are last: their results stay until someone removes them.
    ordered = sorted(records.values(), key=lambda record: [*order, record.stage].index(record.stage))
    return results.model_copy(update={kind: ordered})


def read_results(folder: Path, machine: Machine) -> Results:
    """The folder's results, or none measured yet; always with the machine as it is now.

    Raises DataError where the file is damaged or of another format.
    """
    path = folder / RESULTS_FILE
    if not path.is_file():
        return Results(machine=machine)
    try:
        results = Results.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(f"{path}: no results of this format; move it away and measure again") from error
    # As it is now: the folder's name is the machine's, whose system and Python may be newer than the results.
    return results.model_copy(update={"machine": machine})


def verdict(measured_ratio: Ratio, floor: float | None) -> Verdict:
    """Compare a ratio with its floor; within noise where the interval holds the floor."""
    if floor is None:
        return "no floor"
    if measured_ratio.value >= floor:
        return "reached" if measured_ratio.low >= floor else "reached, within noise"
    return "missed" if measured_ratio.high < floor else "missed, within noise"


def compared(
    comparisons: Sequence[Comparison], case: Case, samples: Mapping[str, list[float]], device: Device
) -> list[ComparisonResult]:
    """The comparisons of a case whose contenders took part."""
    results = []
    for comparison in comparisons:
        ours = samples.get(comparison.ours)
        peer = comparison.peer
        theirs = [peer.value] * case.rounds if isinstance(peer, Reference) else samples.get(peer)
        # A stage names the comparisons of all its cases and devices: here are those whose contenders took part.
        if comparison.case != case.name or ours is None or theirs is None:
            continue
        # Round by round, so that what disturbs the machine for a while is in both sides of a ratio.
        ratios = round_ratios(ours, theirs, case.better)
        of_all = ratio(ratios)
        floor = comparison.floors.get(device)
        results.append(
            ComparisonResult(
                title=comparison.title,
                ours=comparison.ours,
                peer=comparison.peer_name,
                ratios=ratios,
                ratio=of_all.value,
                low=of_all.low,
                high=of_all.high,
                floor=floor,
                verdict=verdict(of_all, floor),
            )
        )
    return results
