"""The report of a search: tune_report.html, one page that needs nothing else, its picture, and the terminal's table."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.publishing import write_atomically
from tuning.limits import Limit, find_limit
from tuning.plots import draw_search
from tuning.results import Results, noise_lines, speed_text
from tuning.settings import NAMES, STATUSES, memory_text, settings_text, value_text

HTML_FILE, PNG_FILE = "tune_report.html", "tune_report.png"
SHOWN = 5
"""Configurations in the terminal's table."""

_STYLE = """
:root { color-scheme: light dark; }
body { max-width: 1180px; margin: 2rem auto; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
img { max-width: 100%; background: #fff; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; text-align: left; border-bottom: 1px solid #8884; }
tr.best { font-weight: 600; color: #d62f6b; }
tr.failed { color: #c0392b; }
pre { padding: 10px; border: 1px solid #8884; overflow-x: auto; }
"""


def write_tune_report(results: Results, folder: Path) -> None:
    """Write the page and the picture; there may be no result."""
    headline = _headline(results)
    draw_search(results, folder / PNG_FILE, f"{folder.name}: {headline}")
    parts = "\n".join(_parts(results, folder, headline))
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(folder.name)}: search'
        f"</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{parts}\n</body>\n</html>\n"
    )
    write_atomically(folder / HTML_FILE, page)


def print_table(results: Results, console: Console) -> None:
    """The fastest that fit, with what limits each, and the number of each result."""
    ranked, varied = results.ranked, results.space.varied
    table = Table(title=f"The fastest {min(SHOWN, len(ranked))} of {len(results.trials)} configurations")
    for heading in ("trial", *(NAMES[name] for name in varied), "tokens/s", "peak memory", "limited by"):
        table.add_column(heading, justify="right" if heading in ("trial", "tokens/s", "peak memory") else "left")
    for trial in ranked[:SHOWN]:
        values = [value_text(name, getattr(trial.settings, name)) for name in varied]
        memory = memory_text(trial.measurement.peak_memory_bytes)
        speed = f"{trial.measurement.tokens_per_s:,.0f}"
        table.add_row(str(trial.number), *values, speed, memory, find_limit(trial, results).topic)
    console.print(table)
    limit = f"{find_limit(ranked[0], results).summary}."
    console.print("\n".join([results.outcomes(), *noise_lines(results), limit]), highlight=False)


def _headline(results: Results) -> str:
    best = results.best
    if best is None:
        return "no configuration was found that fits"
    settings = settings_text(best.settings, results.space.varied) or "the only configuration"
    return f"{speed_text(best.measurement)} with {settings}"


def _parts(results: Results, folder: Path, headline: str) -> Iterator[str]:
    best = results.best
    yield _tag("h1", "Search for the fastest settings")
    yield _tag("p", f"{folder.name}: {headline}.")
    yield _bullets(_summary(results))
    if best is not None:
        yield _tag("h2", "What limits")
        yield from _limit(find_limit(best, results))
        yield f"<pre>{escape(f'python train_ray.py --config {folder}/best.yaml')}</pre>"
    picture = base64.b64encode((folder / PNG_FILE).read_bytes()).decode("ascii")
    yield f'<p><img alt="Speed and peak memory by token budget" src="data:image/png;base64,{picture}"></p>'
    yield _tag("h2", "Every configuration")
    yield _trials_table(results)
    yield _tag("p", "Real tokens per second over all workers, with the loader.")


def _summary(results: Results) -> Iterator[str]:
    best, own = results.best, results.own
    if best is not None and own is not None:
        ratio = (best.measurement.tokens_per_s or 0.0) / (own.measurement.tokens_per_s or 1.0)
        yield f"{ratio:.2f}× the experiment's own settings, {speed_text(own.measurement)}"
    yield f"{len(results.trials)} configurations tried of {len(results.space)}: {results.outcomes()}"
    yield f"{sum(trial.measurement.seconds for trial in results.trials) / 60:.1f} min of measuring"


def _limit(limit: Limit) -> Iterator[str]:
    yield _tag("p", f"{limit.summary}.")
    for title, sentences in (("What shows it", limit.evidence), ("What to try next", limit.advice)):
        if sentences:
            yield _tag("h3", title)
            yield _bullets(sentences)


def _trials_table(results: Results) -> str:
    """Configurations that fit by speed, then the others in their order."""
    names, ranked = results.space.varied, results.ranked
    header = ["trial", "result", *(NAMES[name] for name in names), "tokens/s", "peak memory", "took", "reason"]
    rows = []
    for trial in [*ranked, *(trial for trial in results.trials if trial not in ranked)]:
        measurement = trial.measurement
        speed, peak = measurement.tokens_per_s, measurement.peak_memory_bytes
        cells = [
            str(trial.number),
            STATUSES[measurement.status],
            *(value_text(name, getattr(trial.settings, name)) for name in names),
            "" if speed is None else f"{speed:,.0f}",
            "" if peak is None else memory_text(peak),
            f"{measurement.seconds:.1f} s",
            measurement.reason,
        ]
        failed = measurement.status not in ("ok", "pruned")
        rows.append((cells, "best" if trial is results.best else "failed" if failed else ""))
    head = "".join(_tag("th", name) for name in header)
    body = "\n".join(f'<tr class="{look}">{"".join(_tag("td", cell) for cell in cells)}</tr>' for cells, look in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _bullets(items: Iterable[str]) -> str:
    return f"<ul>{''.join(_tag('li', item) for item in items)}</ul>"


def _tag(name: str, text: str) -> str:
    return f"<{name}>{escape(text)}</{name}>"
