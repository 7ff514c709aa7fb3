"""The report of a search: the self-contained page tune_report.html, its plot, and the table in the terminal.

The trials show what limits a configuration, as judged by :mod:`esmeray.monitoring.advice`.
"""

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table

from esmeray.common.publishing import write_atomically
from esmeray.monitoring.advice import Advice, Facts, advise, what_limits
from esmeray.tuning.plots import draw_search
from esmeray.tuning.records import (
    KEYS,
    NAMES,
    STATUSES,
    SearchFolder,
    Settings,
    Trial,
    memory_text,
    settings_text,
    value_text,
)
from esmeray.tuning.results import Results, noise_lines, speed_text
from esmeray.tuning.space import needs_at_least

_PHASES = {
    "data_wait": "waiting for batches",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "communication": "communication",
}
_SETTINGS = ("tokens", "precision", "gradient_checkpointing", "compile", "num_workers", "stage", "workers")
"""Settings that the advice mentions."""
_SEARCHED = ("loading", "communication", "memory", "compute")
"""Topics of advice about the step of a configuration."""
_UNKNOWN = Advice("unknown", "Bottleneck unknown: the phases of a step were not measured")

SHOWN = 5
"""Number of trials in the terminal's table."""
PAGE_WIDTH = 250
"""Columns of the page's table, wide enough for every reason to stay on one line."""

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title></head>
<body style="margin: 2rem; font: 15px/1.5 system-ui, sans-serif">
<h1>Search for the fastest settings</h1>
<p>{title}</p>
<p><img style="max-width: 100%" alt="Speed and peak memory by token budget" src="data:image/png;base64,{picture}"></p>
<pre style="overflow-x: auto; line-height: 1.2">{text}</pre>
</body>
</html>
"""


def write_tune_report(results: Results, folder: SearchFolder) -> None:
    """Write the page and the plot; the search may have no result."""
    title = f"{folder.path.name}: {_headline(results)}"
    draw_search(results, folder.picture, title)
    console = Console(record=True, file=io.StringIO(), width=PAGE_WIDTH)
    console.print("\n".join(_summary(results)), highlight=False, markup=False)
    others = [trial for trial in results.trials if trial not in results.ranked]  # with failures and their reasons
    console.print(_table("Every trial", [*results.ranked, *others], results))
    if results.best is not None:
        console.print(f"python train_ray.py --config {folder.best}", highlight=False, markup=False)
    # Reuse the terminal's table as HTML instead of maintaining a second layout.
    text = console.export_html(code_format="{code}", inline_styles=True)
    # Embedded, so that the page can be sent or attached as a single file.
    picture = base64.b64encode(folder.picture.read_bytes()).decode("ascii")
    write_atomically(folder.report, _PAGE.format(title=escape(title), picture=picture, text=text))


def print_table(results: Results, console: Console) -> None:
    """Print the fastest configurations and what limits the best; for a search over budgets alone, every budget."""
    if results.space.varied == ["tokens"]:
        console.print(_table("Token budgets", sorted(results.trials, key=lambda trial: trial.settings.tokens), results))
    else:
        fastest = results.ranked[:SHOWN]
        console.print(_table(f"The fastest {len(fastest)} of {len(results.trials)} configurations", fastest, results))
    console.print("\n".join(_summary(results)), highlight=False, markup=False, soft_wrap=True)


def _headline(results: Results) -> str:
    best = results.best
    if best is None:
        return "no configuration fits"
    # Nothing was varied if each setting had one value.
    varied = settings_text(best.settings, results.space.varied) or "the only configuration"
    return f"{speed_text(best.measurement)} with {varied}"


def _summary(results: Results) -> Iterator[str]:
    yield f"{len(results.trials)} of {len(results.space)} configurations tried: {results.outcomes()}."
    yield f"{sum(trial.measurement.seconds for trial in results.trials) / 60:.1f} min of measuring."
    best = results.best
    if best is None:
        return
    own = results.own
    if own is not None:
        ratio = (best.measurement.tokens_per_s or 0.0) / (own.measurement.tokens_per_s or 1.0)
        yield f"{ratio:.2f}× the speed of the experiment's own settings, {speed_text(own.measurement)}."
    yield from noise_lines(results)
    limit, *further = advice_for(best, results)
    yield f"{limit.finding}."
    yield from filter(None, [shares_text(best)])
    yield from (f"To try next: {action.text}" for action in limit.actions)
    yield from (f"To try next: {advice}" for advice in further)


def _table(title: str, trials: Sequence[Trial], results: Results) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("trial", *(NAMES[name] for name in results.space.varied), "tokens/s", "peak memory"):
        table.add_column(heading, justify="right")
    table.add_column("result")
    for trial in trials:
        measurement = trial.measurement
        speed = "" if measurement.tokens_per_s is None else f"{measurement.tokens_per_s:,.0f}"
        peak = "" if measurement.peak_memory_bytes is None else memory_text(measurement.peak_memory_bytes)
        result = f"{STATUSES[measurement.status]}: {measurement.reason}"
        style = "" if measurement.tokens_per_s else "red"
        if measurement.status == "ok":
            result = f"limited by {advice_for(trial, results)[0].topic}"
        if trial is results.best:
            style = "bold"
        values = [value_text(name, getattr(trial.settings, name)) for name in results.space.varied]
        table.add_row(str(trial.number), *values, speed, peak, result, style=style)
    return table


def advice_for(trial: Trial, results: Results) -> list[Advice]:
    """Return what limits a fully measured configuration, then other advice."""
    facts = _facts(trial, results)
    limit = what_limits(facts)
    # Topics of the step exclude one another: only the limiting one is shown.
    further = [advice for advice in advise(facts) if advice.actions and advice.topic not in _SEARCHED]
    return [limit, *further] if limit is not None else [_UNKNOWN]


def shares_text(trial: Trial) -> str:
    """Return the phases of a step as shares of its time, in one line."""
    shares = trial.measurement.shares
    phases = [f"{text} {shares[name]:.0%}" for name, text in _PHASES.items() if shares.get(name, 0.0) >= 0.005]
    return f"Time per step: {', '.join(phases)}, other {max(0.0, 1 - sum(shares.values())):.0%}." if phases else ""


def _facts(trial: Trial, results: Results) -> Facts:
    settings = trial.settings
    shares: dict[str, Any] = dict(trial.measurement.shares)
    if settings.workers == 1:  # with one worker, communication is only its agreement with itself
        shares.pop("communication", None)
    others = [other.settings for other in results.trials]
    tried = {KEYS[name] for name in NAMES if any(_differs_in(name, settings, other) for other in others)}
    # Smaller budgets alone don't show whether a larger one is faster.
    if not any(other.tokens > settings.tokens for other in others):
        tried.discard(KEYS["tokens"])
    return Facts(
        **shares,
        memory=trial.measurement.memory_share,
        memory_limits=_is_blocked(settings, results),
        rise=_rise(trial, results),
        **{name: getattr(settings, name) for name in _SETTINGS},
        tried=frozenset(tried),
    )


def _is_blocked(settings: Settings, results: Results) -> bool:
    """Return whether the next larger budget needs at least the memory of a configuration that was too large."""
    larger = [replace(settings, tokens=tokens) for tokens in results.space.budgets if tokens > settings.tokens][:1]
    too_large = [o.settings for o in results.trials if o.measurement.is_too_large(results.margin)]
    return any(needs_at_least(following, other) for following in larger for other in too_large)


def _rise(trial: Trial, results: Results) -> float | None:
    """Return the speed relative to the next smaller measured budget with all other settings equal, minus 1."""
    # All other settings must be equal: otherwise their effect would count as the budget's.
    smaller = [
        other
        for other in results.measured
        if _differs_in("tokens", trial.settings, other.settings) and other.settings.tokens < trial.settings.tokens
    ]
    nearest = max(smaller, key=lambda other: other.settings.tokens, default=trial).measurement.tokens_per_s
    own = trial.measurement.tokens_per_s
    return own / nearest - 1 if smaller and own and nearest else None


def _differs_in(name: str, settings: Settings, other: Settings) -> bool:
    """Test whether two configurations differ in this setting and in no other."""
    return [key for key in NAMES if getattr(settings, key) != getattr(other, key)] == [name]
