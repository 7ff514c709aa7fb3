"""The report of a search: tune_report.html, one page that needs nothing else, its picture, and the terminal's table."""

import base64
import io
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.publishing import write_atomically
from tuning.limits import find_limit, shares_text
from tuning.plots import draw_search
from tuning.records import Trial
from tuning.results import Results, noise_lines, speed_text
from tuning.settings import NAMES, STATUSES, memory_text, settings_text, value_text

HTML_FILE, PNG_FILE = "tune_report.html", "tune_report.png"
SHOWN = 5
"""Trials in the terminal's table."""
PAGE_WIDTH = 250
"""Columns of the page's table, in which no reason is broken."""

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


def write_tune_report(results: Results, folder: Path) -> None:
    """Write the page and the picture; there may be no result."""
    title = f"{folder.name}: {_headline(results)}"
    draw_search(results, folder / PNG_FILE, title)
    console = Console(record=True, file=io.StringIO(), width=PAGE_WIDTH)
    console.print("\n".join(_summary(results)), highlight=False, markup=False)
    others = [trial for trial in results.trials if trial not in results.ranked]
    console.print(_table("Every trial", [*results.ranked, *others], results))
    if results.best is not None:
        console.print(f"python train_ray.py --config {folder}/best.yaml", highlight=False, markup=False)
    text = console.export_html(code_format="{code}", inline_styles=True)
    picture = base64.b64encode((folder / PNG_FILE).read_bytes()).decode("ascii")
    write_atomically(folder / HTML_FILE, _PAGE.format(title=escape(title), picture=picture, text=text))


def print_table(results: Results, console: Console) -> None:
    """The fastest that fit, or every token budget of a search over these alone, and what limits the fastest."""
    if results.space.varied == ["tokens"]:
        by_budget = sorted(results.trials, key=lambda trial: trial.settings.tokens)
        console.print(_table("Token budgets", by_budget, results))
    else:
        fastest = results.ranked[:SHOWN]
        console.print(_table(f"The fastest {len(fastest)} of {len(results.trials)} configurations", fastest, results))
    console.print("\n".join(_summary(results)), highlight=False, markup=False, soft_wrap=True)


def _headline(results: Results) -> str:
    best = results.best
    if best is None:
        return "no configuration was found that fits"
    settings = settings_text(best.settings, results.space.varied) or "the only configuration"
    return f"{speed_text(best.measurement)} with {settings}"


def _summary(results: Results) -> Iterator[str]:
    yield f"{len(results.trials)} configurations tried of {len(results.space)}: {results.outcomes()}."
    yield f"{sum(trial.measurement.seconds for trial in results.trials) / 60:.1f} min of measuring."
    best, own = results.best, results.own
    if best is None:
        return
    if own is not None:
        ratio = (best.measurement.tokens_per_s or 0.0) / (own.measurement.tokens_per_s or 1.0)
        yield f"{ratio:.2f}× the experiment's own settings, {speed_text(own.measurement)}."
    yield from noise_lines(results)
    limit = find_limit(best, results)
    yield f"{limit.summary}."
    yield from filter(None, [shares_text(best)])
    yield from (f"To try next: {advice}" for advice in limit.advice)


def _table(title: str, trials: Sequence[Trial], results: Results) -> Table:
    """A row a trial; the last column says what limits it, or why it has no result."""
    table = Table(title=title, title_justify="left")
    for heading in ("trial", *(NAMES[name] for name in results.space.varied), "tokens/s", "peak memory"):
        table.add_column(heading, justify="right")
    table.add_column("result")
    for trial in trials:
        measurement = trial.measurement
        values = [value_text(name, getattr(trial.settings, name)) for name in results.space.varied]
        speed = "" if measurement.tokens_per_s is None else f"{measurement.tokens_per_s:,.0f}"
        peak = "" if measurement.peak_memory_bytes is None else memory_text(measurement.peak_memory_bytes)
        is_complete = measurement.status == "ok"
        outcome = STATUSES[measurement.status]
        result = f"limited by {find_limit(trial, results).topic}" if is_complete else f"{outcome}: {measurement.reason}"
        style = "bold" if trial is results.best else "" if measurement.tokens_per_s else "red"
        table.add_row(str(trial.number), *values, speed, peak, result, style=style)
    return table
