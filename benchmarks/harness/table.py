"""``results.md``: the comparisons of one machine as a Markdown table, and what each case was measured with.

In: the results. Out: text for a reader, and for the README.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.harness.results import CaseResult, ComparisonResult, Results

_HEADER = ("stage", "what", "ours", "peer", "ratio", "interval", "floor", "reached")
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
    parts = [
        f"# {machine.slug}",
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB{gpu}; {machine.system}, Python "
        f"{machine.python}. Made by `python -m benchmarks`; every sample is in `results.json`.",
        *(["**Of a smoke run: these values mean nothing.**"] if results.smoke else []),
        comparison_table(results),
        "A ratio is the median over the rounds, its interval the smallest and the largest (of fewer than nine); larger "
        "is better for ours.",
        *(_case(case) for case in results.cases),
    ]
    return "\n\n".join(parts) + "\n"


def comparison_table(results: Results) -> str:
    """One row for each comparison."""
    rows = [_row(case, comparison) for case in results.cases for comparison in case.comparisons]
    return _table(_HEADER, rows)


def quantity(value: float, unit: str) -> str:
    """A measured value with three digits, and thousands set off where it is large."""
    shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{shown} {unit}"


def ratio_text(ratio: float) -> str:
    """A ratio with as many digits as it deserves: 312, 41, 8.3, 0.97."""
    if ratio >= 100:
        return f"{ratio:,.0f}"
    return f"{ratio:.3g}" if ratio >= 10 else f"{ratio:.2f}"


def ratio_texts(comparison: ComparisonResult) -> tuple[str, str]:
    """The ratio and its interval."""
    return ratio_text(comparison.ratio), f"{ratio_text(comparison.low)} to {ratio_text(comparison.high)}"


def _row(case: CaseResult, comparison: ComparisonResult) -> list[str]:
    medians = {contender.name: quantity(contender.median, case.unit) for contender in case.contenders}
    peer = f"{comparison.peer}: {medians[comparison.peer]}" if comparison.peer in medians else comparison.peer
    ratio, interval = ratio_texts(comparison)
    return [
        case.stage,
        comparison.title,
        f"{comparison.ours}: {medians[comparison.ours]}",
        peer,
        f"**{ratio}**",
        interval,
        "" if comparison.floor is None else ratio_text(comparison.floor),
        _VERDICTS[comparison.verdict],
    ]


def _case(case: CaseResult) -> str:
    rows = [
        [
            contender.name,
            quantity(contender.median, case.unit),
            f"{quantity(contender.lower_quartile, '').strip()} to {quantity(contender.upper_quartile, '').strip()}",
            str(len(contender.samples)),
            {True: "steady", False: "not steady", None: ""}[contender.warm_up_settled],
        ]
        for contender in case.contenders
    ]
    versions = ", ".join(f"{name} {version}" for name, version in case.versions.items())
    lines = [
        f"## {case.stage}: {case.case}",
        _table(("contender", "median", "quartiles", "rounds", "warm-up"), rows),
        f"{case.date}, `{case.command}`, revision {case.revision or 'unknown'}, on {case.device}; {versions}.",
    ]
    if case.facts:
        lines.append("\n".join(f"- {name}: {_fact(value)}" for name, value in case.facts.items()))
    return "\n\n".join(lines)


def _fact(value: float | int | str | bool) -> str:
    if isinstance(value, (bool, str)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = [list(header), *map(list, rows)]
    rule = ["---"] * len(cells[0])
    return "\n".join("| " + " | ".join(row) + " |" for row in [cells[0], rule, *cells[1:]])
