"""``results.md``: the comparisons of one machine as a Markdown table, and what each case was measured with."""

from collections.abc import Sequence

from benchmarks.harness.results import CaseResult, ComparisonResult, Origin, Results, Table
from benchmarks.harness.stage import Row

_VERDICTS = {
    "reached": "yes",
    "reached, within noise": "yes, not in every round",
    "missed, within noise": "no, but in some round",
    "missed": "**no**",
    "no floor": "",
}


def markdown(results: Results) -> str:
    """The whole page."""
    machine = results.machine
    gpu = f", {machine.gpu} ({machine.gpu_memory_gib:g} GiB)" if machine.gpu else ""
    rows = [_row(case, comparison) for case in results.cases for comparison in case.comparisons]
    compared = [
        grid(rows),
        "A ratio is the median over the rounds, its interval the smallest and the largest (of fewer than nine); larger "
        "is better for ours.",
    ]
    parts = [
        f"# {machine.slug}",
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB{gpu}; {machine.system}, Python "
        f"{machine.python}. Made by `python -m benchmarks`; every sample is in `results.json`.",
        *(["**Of a smoke run: these values mean nothing.**"] if results.smoke else []),
        # A machine that takes tables alone, such as one with a GPU, has no comparison to show an empty grid of.
        *(compared if results.cases or not results.tables else []),
        *(_case(case) for case in results.cases),
        *(_table(table) for table in results.tables),
    ]
    return "\n\n".join(parts) + "\n"


def quantity(value: float, unit: str) -> str:
    """A measured value with three digits, and thousands set off where it is large."""
    # More digits than three would be of the machine's noise.
    shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{shown} {unit}"


def ratio_text(ratio: float) -> str:
    """A ratio with as many digits as it deserves: 312, 41, 8.3, 0.97."""
    if ratio >= 100:
        return f"{ratio:,.0f}"
    return f"{ratio:.3g}" if ratio >= 10 else f"{ratio:.2f}"


def case_text(case: CaseResult) -> str:
    """A case for the terminal: its name, then a line for each contender and comparison."""
    lines = [case.case]
    lines += [f"  {contender.name:<44} {quantity(contender.median, case.unit)}" for contender in case.contenders]
    for comparison in case.comparisons:
        floor = "" if comparison.floor is None else f", floor {ratio_text(comparison.floor)}: {comparison.verdict}"
        ratio = f"{ratio_text(comparison.ratio)}× ({_interval(comparison)})"
        lines.append(f"  {comparison.title}, beside {comparison.peer}: {ratio}{floor}")
    return "\n".join(lines)


def row_text(row: Row) -> str:
    """A row of values in one line."""
    return ", ".join(f"{column} {_fact(value)}" for column, value in row.items() if value is not None)


def _row(case: CaseResult, comparison: ComparisonResult) -> Row:
    medians = {contender.name: quantity(contender.median, case.unit) for contender in case.contenders}
    peer = f"{comparison.peer}: {medians[comparison.peer]}" if comparison.peer in medians else comparison.peer
    return {
        "stage": case.stage,
        "what": comparison.title,
        "ours": f"{comparison.ours}: {medians[comparison.ours]}",
        "peer": peer,
        "ratio": f"**{ratio_text(comparison.ratio)}**",
        "interval": _interval(comparison),
        "floor": None if comparison.floor is None else ratio_text(comparison.floor),
        "reached": _VERDICTS[comparison.verdict],
    }


def _interval(comparison: ComparisonResult) -> str:
    return f"{ratio_text(comparison.low)} to {ratio_text(comparison.high)}"


def _table(table: Table) -> str:
    head = f"## {table.stage}\n\n{table.summary}\n\n{_origin(table)}, {table.seconds:.0f} s."
    return f"{head}\n\n{grid(table.rows)}"


def grid(rows: Sequence[Row]) -> str:
    """A Markdown table of rows of values."""
    # In the order of first appearance: rows of one table may have columns of their own.
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_fact(row.get(column)) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _origin(measured: Origin, device: str = "") -> str:
    versions = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    return f"{measured.date}, `{measured.command}`, revision {measured.revision or 'unknown'}{device}; {versions}"


def _case(case: CaseResult) -> str:
    # Said with the case: a contender that was still warming up is measured too slow.
    unsteady = ", ".join(contender.name for contender in case.contenders if contender.warm_up_settled is False)
    facts = [f"- {name}: {_fact(value)}" for name, value in case.facts.items()]
    lines = [
        f"## {case.stage}: {case.case}",
        f"{_origin(case, f', on {case.device}')}.",
        *([f"Not steady after the warm-up: {unsteady}."] if unsteady else []),
        *(["\n".join(facts)] if facts else []),
    ]
    return "\n\n".join(lines)


def _fact(value: float | int | str | bool | None) -> str:
    # Before numbers: to Python a bool is an int.
    if value is None or isinstance(value, (bool, str)):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
