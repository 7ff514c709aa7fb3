"""``public.md`` and ``public.png``: a row for each metric of each public benchmark, with what stands beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.harness.table import grid
from benchmarks.public.benchmark import Measured, Metric, PublicBenchmark
from esmeray.common.figure_style import BLUE, GREY, INK, ORANGE, legend, picture, style
from esmeray.common.publishing import write_atomically

RECORDS = Path(__file__).resolve().parents[1] / "records.md"
Results = Mapping[str, Sequence[Measured]]
"""The seeds of each benchmark that was measured, by its name."""


def write_page(benchmarks: Sequence[PublicBenchmark], results: Results, weights: str | None, path: Path) -> None:
    """The page of what was measured until now, and its picture beside it."""
    shown = [benchmark for benchmark in benchmarks if results.get(benchmark.name)]
    rows = [_row(benchmark, metric, results[benchmark.name]) for benchmark in shown for metric in benchmark.metrics]
    missing = [benchmark.name for benchmark in benchmarks if benchmark not in shown]
    whose = f"The language model's weights are {weights}." if weights else RANDOM
    parts = [
        "# Public benchmarks",
        f"**{whose}** Means over the seeds, with their range; intervals are of 95 % over the records, means of those "
        "of the seeds. `python -m benchmarks public` measures what is missing and writes this page; "
        "`python -m benchmarks public NAME` one benchmark.",
        grid(rows),
        f"![Ours beside published values]({path.with_suffix('.png').name})",
        *([f"Not measured yet: {', '.join(missing)}."] if missing else []),
        *(_section(benchmark, results[benchmark.name]) for benchmark in shown),
        *([] if weights else [_track()]),
    ]
    _draw(shown, results, path.with_suffix(".png"))
    write_atomically(path, "\n\n".join(parts) + "\n")


RANDOM = (
    "No trained language model takes part: every model starts from random weights and sees the data of its benchmark "
    "alone. Published values of methods that start from trained weights say what is to be gained by such weights, not "
    "how well this software trains."
)


def values_of(key: str | None, runs: Sequence[Measured]) -> list[float]:
    """The value of each seed; none without a key."""
    if key is None:
        return []
    return [run.values[key].value for run in runs]


def _row(benchmark: PublicBenchmark, metric: Metric, runs: Sequence[Measured]) -> dict[str, str | int | float | None]:
    values = values_of(metric.key, runs)
    baselines = values_of(metric.baseline, runs)
    intervals = [run.values[metric.key].interval or () for run in runs]
    spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    ends = [mean(end) for end in zip(*intervals, strict=True)]
    return {
        "benchmark": f"[{benchmark.title}](#{benchmark.name.replace('_', '-')})",
        "metric": metric.title,
        "ours": f"**{mean(values):.3f}**{spread}",
        "seeds": len(runs),
        "interval": f"{ends[0]:.3f} to {ends[1]:.3f}" if ends else None,
        "plain baseline": f"{mean(baselines):.3f}" if baselines else None,
        "published": ", ".join(f"{name} {value:.3g}" for name, value in metric.published.items()),
    }


def _section(benchmark: PublicBenchmark, runs: Sequence[Measured]) -> str:
    machines = ", ".join(dict.fromkeys(run.machine.slug for run in runs))
    revisions = ", ".join(dict.fromkeys(run.revision for run in runs))
    versions = ", ".join(f"{name} {version}" for name, version in runs[0].versions.items())
    lines = [
        f"- data: {benchmark.data}",
        f"- split: {benchmark.split}",
        f"- plain baseline: {benchmark.baseline}",
        f"- published values: {benchmark.source}",
        f"- not comparable: {benchmark.differs}",
        f"- measured: {runs[0].date}, `python -m benchmarks public {benchmark.name}`, "
        f"{mean(run.seconds for run in runs) / 60:.1f} minutes a seed; {machines}, revision {revisions}; {versions}",
    ]
    commands = "\n".join(f"    {command}" for command in runs[0].commands)
    heading = f'## <a id="{benchmark.name.replace("_", "-")}"></a>{benchmark.title}'
    return f"{heading}\n\n" + "\n".join(lines) + f"\n\n{commands}"


def _track() -> str:
    """The records of the ten-minute track, which has a command and a page of its own."""
    _, _, table = RECORDS.read_text(encoding="utf-8").partition("\n| date ")
    return (
        "## Ten-minute track\n\nBits a masked residue of the UniRef90 sample's test part after ten minutes of training "
        "on two cores; less is better. Plain baseline: the residues' frequencies, 4.142 bits. Nothing is published "
        f"beside it. `python -m benchmarks record` has the rules.\n\n| date {table.strip()}"
    )


def _draw(benchmarks: Sequence[PublicBenchmark], results: Results, path: Path) -> None:
    # Values that are no share, such as bits, have an axis of their own and stay in the table.
    rows = [
        (benchmark, metric)
        for benchmark in benchmarks
        for metric in benchmark.metrics
        if max(values_of(metric.key, results[benchmark.name])) <= 1
    ]
    with picture(path, 10, 1.6 + 0.45 * len(rows), "Public benchmarks: ours, a baseline, published values") as figure:
        axes = figure.add_subplot()
        style(axes)
        axes.set_xlim(-0.02, 1.02)
        for index, (benchmark, metric) in enumerate(rows):
            runs = results[benchmark.name]
            ours = values_of(metric.key, runs)
            axes.plot([min(ours), max(ours)], [index, index], color=BLUE, linewidth=4)
            marks = {
                "published": ([*metric.published.values()], "o", GREY),
                "plain baseline": (values_of(metric.baseline, runs), "|", ORANGE),
                "ours": ([mean(ours)], "D", BLUE),
            }
            for name, (values, marker, colour) in marks.items():
                # The legend names each mark once.
                label = name if index == 0 else None
                axes.plot(values, [index] * len(values), marker, color=colour, markersize=9, label=label)
        axes.set_yticks(range(len(rows)), [f"{benchmark.title}\n{metric.title}" for benchmark, metric in rows])
        axes.invert_yaxis()
        axes.grid(axis="x", color="#e6e8eb")
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        legend(axes, over_curves=True)
