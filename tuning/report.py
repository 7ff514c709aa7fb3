"""The report of a throughput search: ``tune_report.html`` and ``tune_report.png`` beside its trials.

In: the lines of trials.jsonl, the folder of the search and its space. From the folder come the experiment's own
settings (config.yaml), to compare the best with, and the memory margin (tune.yaml). Out: both files, each complete or
not there. The pictures are drawn by :mod:`tuning.plots`, what limits is found by :mod:`tuning.limits`,
the page is put together of :mod:`tuning.tune_page`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common.publishing import write_atomically
from common.text import duration
from train_config.loading import load_config, load_tune_config
from train_config.schema import Config
from train_config.tune_schema import TuneConfig
from tuning.limits import KEYS, Limit, find_limit
from tuning.plots import draw_search, panel_pngs
from tuning.settings import Settings
from tuning.tune_importance import importance
from tuning.tune_page import Cell, Row, bullets, cards, page, picture, table, tag
from tuning.tune_trials import (
    NAMES,
    RULED_OUT,
    STATUSES,
    Search,
    Trial,
    measured,
    memory_text,
    noise_text,
    pareto,
    read_trials,
    settings_text,
    speed,
    value_text,
    varied,
)

HTML_FILE, PNG_FILE = "tune_report.html", "tune_report.png"
_FAILED = ("out_of_memory", "crash", "timeout", "nan", "refused")


@dataclass(frozen=True)
class Report:
    """What the page tells.

    Attributes:
        name: of the search.
        folder: of the search, as the reader would type it.
        search: the trials.
        limit: what limits the best.
        own: the trial of the experiment's own settings; None where that was none.
    """

    name: str
    folder: Path
    search: Search
    limit: Limit
    own: Trial | None

    @property
    def names(self) -> list[str]:
        """Settings that were varied."""
        return varied(self.search.trials, self.search.space)


def write_tune_report(trials: Sequence[Mapping[str, Any]], folder: Path, space: Mapping[str, list]) -> None:
    """Write both files, replacing those that are there.

    Args:
        trials: as in trials.jsonl, in order; may be empty.
        folder: of the search, for the files, and with config.yaml and tune.yaml where they are there.
        space: values of each setting that the search may take.

    Raises:
        ConfigError: config.yaml or tune.yaml of the folder, or DeepSpeed's settings, can't be read.
    """
    report = _report(read_trials(trials), folder, space)
    draw_search(report.search, folder / PNG_FILE, f"{report.name}: {_headline(report)}")
    write_atomically(folder / HTML_FILE, page(f"{report.name}: throughput search", _parts(report)))


def _report(trials: Sequence[Trial], folder: Path, space: Mapping[str, list]) -> Report:
    tune, config = folder / "tune.yaml", folder / "config.yaml"
    margin = (load_tune_config(tune) if tune.is_file() else TuneConfig()).memory_margin  # type: ignore[call-arg]
    own = own_trial(trials, load_config(config)) if config.is_file() else None
    shares, method = importance(trials)
    search = Search(trials, space, margin, shares, method)
    return Report(folder.name, folder, search, find_limit(trials, space, margin), own)


def own_trial(trials: Sequence[Trial], config: Config) -> Trial | None:
    """The trial of an experiment's own settings; of several worker counts, where it leaves them open, the largest."""
    own = asdict(Settings.of(config, workers=0))
    del own["workers"]
    if config.ray.num_workers != "auto":
        own["workers"] = config.ray.num_workers
    alike = [trial for trial in measured(trials) if all(trial.settings.get(name) == own[name] for name in own)]
    return max(alike, key=lambda trial: trial.settings.get("workers") or 0, default=None)  # type: ignore[arg-type, return-value]


def _parts(report: Report) -> Iterator[str]:
    best = report.search.best
    yield tag("h1", "Throughput search")
    yield tag("p", f"{report.name}: {_headline(report)}.", "lead")
    yield cards(_figures(report))
    yield tag("h2", "What limits")
    yield _verdict(report.limit)
    if best is not None:
        yield tag("h2", "The fastest configuration")
        yield _best_table(report, best)
        yield f"<pre>{tag('code', f'python train_ray.py --config {report.folder}/best.yaml')}</pre>"
    yield tag("h2", "The search in pictures")
    yield _pictures(report)
    yield tag("h2", "Speed and memory")
    yield tag(
        "p",
        "Configurations, measured to the end, that no other beats in both; a slower one leaves more memory free.",
    )
    yield _pareto_table(report)
    yield tag("h2", "Every configuration")
    yield tag("p", f"{_outcomes(report.search.trials)} Click a heading to sort.")
    yield _trials_table(report)
    yield tag("footer", _footnote(report))


def _headline(report: Report) -> str:
    best = report.search.best
    if best is None:
        return "no configuration was found that fits"
    return f"{speed(best):,.0f} tokens/s{noise_text(best)} with {settings_text(best.settings, report.names)}"


def _figures(report: Report) -> Iterator[tuple[str, str]]:
    search, best = report.search, report.search.best
    if best is not None:
        yield f"{speed(best):,.0f}", f"real tokens/s, the fastest that fits{noise_text(best)}"
        if report.own is not None:
            yield _times(best, speed(report.own)), f"the experiment's own settings{noise_text(report.own)}"
        yield _times(best, median(speed(trial) for trial in measured(search.trials))), "the median of what was measured"
        if best.memory_share is not None:
            yield f"{best.memory_share:.0%}", f"of {memory_text(best.total_bytes)} of memory at its peak"
    tried = [trial for trial in search.trials if not trial.is_ruled_out]
    failed = sum(trial.status in _FAILED for trial in tried)
    yield str(len(tried)), f"configurations tried, {failed} of them failed"
    yield duration(sum(trial.seconds for trial in search.trials)), "of measuring"


def _times(best: Trial, other: float) -> str:
    return f"{speed(best) / other:.2f}×" if other else "-"


def _verdict(limit: Limit) -> str:
    parts = [tag("p", limit.summary)]
    for title, sentences in (("What shows it", limit.evidence), ("What to try next", limit.advice)):
        if sentences:
            parts += [tag("h3", title), bullets(sentences)]
    return f'<div class="verdict">{"".join(parts)}</div>'


def _best_table(report: Report, best: Trial) -> str:
    own = report.own.settings if report.own is not None else None
    rows = []
    for name in NAMES:
        if name not in best.settings:
            continue
        value, before = best.settings[name], own.get(name) if own else None
        cells = [Cell(NAMES[name]), Cell(KEYS[name]), Cell(value_text(name, value))]
        cells += [Cell(value_text(name, before))] if own else []
        rows.append(Row(cells, "best" if own and value != before else "" if name in report.names else "faint"))
    return table(["setting", "key", "value", *(["the experiment's own"] if own else [])], rows)


def _pictures(report: Report) -> str:
    pictures = panel_pngs(report.search)
    descriptions = {
        "parallel": "Each trial as a line through its settings to its speed",
        "throughput": "Tokens per second against the budget",
        "memory": "Peak memory against the budget, with the limit and the margin",
        "importance": "Share of each setting in the differences of speed",
        "pareto": "Speed against memory",
    }
    made = [picture(pictures[name], text, wide=name == "parallel") for name, text in descriptions.items()]
    return f'<div class="pictures">{"".join(made)}</div>'


def _pareto_table(report: Report) -> str:
    best = report.search.best
    rows = [
        Row(
            [
                Cell(str(trial.number), trial.number),
                *_setting_cells(trial, report.names),
                *_speed_cells(trial, best),
                *_memory_cells(trial),
            ],
            "best" if trial is best else "" if trial.fits(report.search.margin) else "faint",
        )
        for trial in pareto(report.search.trials)
    ]
    header = ["trial", *(NAMES[name] for name in report.names), "tokens/s", "of the best", "peak memory", "of all"]
    return table(header, rows)


def _trials_table(report: Report) -> str:
    best = report.search.best
    header = ["trial", "outcome", *(NAMES[name] for name in report.names), "tokens/s", "of the best", "peak memory"]
    rows = []
    for trial in report.search.trials:
        cells = [Cell(str(trial.number), trial.number), Cell(trial.outcome)]
        cells += [*_setting_cells(trial, report.names), *_speed_cells(trial, best), *_memory_cells(trial)]
        cells += [Cell(f"{trial.seconds:.1f} s", trial.seconds), Cell(trial.phase), Cell(trial.reason, is_long=True)]
        look = "bad" if trial.status in _FAILED else "faint" if trial.status == "pruned" else ""
        rows.append(Row(cells, "best" if trial is best else look))
    return table([*header, "of all", "took", "phase", "reason"], rows)


def _setting_cells(trial: Trial, names: Sequence[str]) -> Iterator[Cell]:
    for name in names:
        value = trial.settings.get(name)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        yield Cell(value_text(name, value), float(value) if is_number else None)  # type: ignore[arg-type]


def _speed_cells(trial: Trial, best: Trial | None) -> Iterator[Cell]:
    known = speed(trial) or None
    yield Cell("" if known is None else f"{known:,.0f}", known)
    share = known / speed(best) if known is not None and best is not None and speed(best) else None
    yield Cell("" if share is None else f"{share:.0%}", share)


def _memory_cells(trial: Trial) -> Iterator[Cell]:
    yield Cell("" if trial.peak_bytes is None else memory_text(trial.peak_bytes), trial.peak_bytes)
    yield Cell("" if trial.memory_share is None else f"{trial.memory_share:.0%}", trial.memory_share)


def _outcomes(trials: Sequence[Trial]) -> str:
    counts = Counter(trial.outcome for trial in trials)
    words = [f"{counts[text]} {text}" for text in (*STATUSES.values(), RULED_OUT) if counts[text]]
    return f"{', '.join(words)}." if words else "None yet."


def _footnote(report: Report) -> str:
    search = report.search
    method = f" What decides the speed: {search.importance_method}." if search.importance_method else ""
    return (
        "Speed is real tokens a second over all workers in the steady state, with the loader in the loop; of a "
        "configuration with several trials their mean, each of them under reason. The fastest has to leave "
        f"{search.margin:.0%} of the memory free.{method}"
    )
