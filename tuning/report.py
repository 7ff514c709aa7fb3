"""The report of a search: tune_report.html, one page that needs nothing else, and its first picture, tune_report.png.

In: the results. Out: both files, each complete or not there.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from common.publishing import write_atomically
from tuning.journal import Trial
from tuning.limits import Limit, find_limit
from tuning.plots import draw_search, parallel_coordinates
from tuning.results import Results, speed_text
from tuning.settings import KEYS, NAMES, STATUSES, memory_text, settings_text, value_text

HTML_FILE, PNG_FILE = "tune_report.html", "tune_report.png"

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
    """Write both files, replacing those that are there.

    Args:
        results: of the search; may be empty.
        folder: of the search.
    """
    headline = _headline(results)
    draw_search(results, folder / PNG_FILE, f"{folder.name}: {headline}")
    parts = "\n".join(_parts(results, folder, headline))
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(folder.name)}: search'
        f"</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{parts}\n</body>\n</html>\n"
    )
    write_atomically(folder / HTML_FILE, page)


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
        yield from _limit(find_limit(best, results.configurations, results.space, results.margin))
        yield _tag("h2", "The fastest configuration")
        yield _settings_table(results, best)
        yield f"<pre>{escape(f'python train_ray.py --config {folder}/best.yaml')}</pre>"
    yield _tag("h2", "Pictures")
    yield _picture((folder / PNG_FILE).read_bytes(), "Speed and peak memory by token budget, and importances")
    if (lines := parallel_coordinates(results)) is not None:
        yield _tag("p", "Each line is a configuration, from its speed through its settings.")
        yield _picture(lines, "Each configuration as a line through its settings")
    yield _tag("h2", "Every configuration")
    yield _trials_table(results)
    yield _tag(
        "p",
        "Speed is real tokens per second over all workers in the steady state, with the loader in the loop; of a "
        f"configuration with several trials it is their mean. The fastest leaves {results.margin:.0%} of the memory "
        "free.",
    )


def _summary(results: Results) -> Iterator[str]:
    best, own = results.best, results.own
    if best is not None and own is not None:
        ratio = (best.measurement.tokens_per_s or 0.0) / (own.measurement.tokens_per_s or 1.0)
        yield f"{ratio:.2f}× the experiment's own settings, {speed_text(own.measurement)}"
    if best is not None and best.measurement.memory_share is not None:
        total = memory_text(best.measurement.total_memory_bytes)
        yield f"{best.measurement.memory_share:.0%} of {total} of memory at its peak"
    yield f"{len(results.configurations)} configurations tried of {len(results.space)}: {results.outcomes()}"
    yield f"{sum(trial.measurement.seconds for trial in results.configurations) / 60:.1f} min of measuring"


def _limit(limit: Limit) -> Iterator[str]:
    yield _tag("p", f"{limit.summary}.")
    for title, sentences in (("What shows it", limit.evidence), ("What to try next", limit.advice)):
        if sentences:
            yield _tag("h3", title)
            yield _bullets(sentences)


def _settings_table(results: Results, best: Trial) -> str:
    own = results.space.default
    rows = []
    for name in NAMES:
        value, before = getattr(best.settings, name), getattr(own, name)
        cells = [NAMES[name], KEYS[name], value_text(name, value), value_text(name, before)]
        rows.append((cells, "best" if value != before else ""))
    return _table(["setting", "key", "value", "the experiment's own"], rows)


def _trials_table(results: Results) -> str:
    """Those that fit by speed, then the others in their order."""
    names, ranked = results.space.varied, results.ranked
    header = ["trial", "result", *(NAMES[name] for name in names), "tokens/s", "peak memory", "took", "phase", "reason"]
    rows = []
    for trial in [*ranked, *(trial for trial in results.configurations if trial not in ranked)]:
        measurement = trial.measurement
        speed, peak = measurement.tokens_per_s, measurement.peak_memory_bytes
        cells = [
            str(trial.number),
            STATUSES[measurement.status],
            *(value_text(name, getattr(trial.settings, name)) for name in names),
            "" if speed is None else f"{speed:,.0f}",
            "" if peak is None else memory_text(peak),
            f"{measurement.seconds:.1f} s",
            trial.phase,
            measurement.reason,
        ]
        failed = measurement.status not in ("ok", "pruned")
        rows.append((cells, "best" if trial is results.best else "failed" if failed else ""))
    return _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[tuple[Sequence[str], str]]) -> str:
    head = "".join(_tag("th", name) for name in header)
    body = "\n".join(f'<tr class="{look}">{"".join(_tag("td", cell) for cell in cells)}</tr>' for cells, look in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _picture(png: bytes, description: str) -> str:
    data = base64.b64encode(png).decode("ascii")
    return f'<p><img alt="{escape(description)}" src="data:image/png;base64,{data}"></p>'


def _bullets(items: Sequence[str] | Iterator[str]) -> str:
    return f"<ul>{''.join(_tag('li', item) for item in items)}</ul>"


def _tag(name: str, text: str) -> str:
    return f"<{name}>{escape(text)}</{name}>"
