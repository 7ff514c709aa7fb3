"""Measure public benchmarks, and write the page that compares them with published values.

Each benchmark runs Esmeray's commands on public data with three seeds. A measured seed is not measured again, and a
stopped one is resumed; the page is written after each. The data are in the development's folder.

Examples:
  python -m benchmarks public
  python -m benchmarks public deeploc banking77 --seeds 0
  python -m benchmarks public deeploc --weights facebook/esm2_t33_650M_UR50D
  python -m benchmarks public --list
"""

import argparse
import os
import sys
from pathlib import Path

from benchmarks.harness.machine import slugify
from benchmarks.harness.stage import DEVELOPMENT_DATA
from benchmarks.public import antibodies, classifiers, design, functions, homology, mutations
from benchmarks.public.benchmark import PublicBenchmark, Work, measured, read_measured
from benchmarks.public.page import write_page
from esmeray.common.errors import ConfigError, DataError
from esmeray.common.progress import status_line

FOLDER = Path(__file__).resolve().parents[1] / "results"
BENCHMARKS: tuple[PublicBenchmark, ...] = tuple(
    benchmark
    for module in (homology, mutations, functions, classifiers, antibodies, design)
    for benchmark in module.BENCHMARKS
)


def parsed(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
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
    add("--list", action="store_true", help="list the benchmarks with their data and splits, and end")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Measure what is missing, write the page."""
    arguments = parsed(argv)
    if unknown := set(arguments.names) - {benchmark.name for benchmark in BENCHMARKS}:
        raise ConfigError(f"no benchmark is called {min(unknown)!r}; --list shows them")
    chosen = [benchmark for benchmark in BENCHMARKS if benchmark.name in arguments.names or not arguments.names]
    if arguments.list:
        for benchmark in chosen:
            print(f"{benchmark.name}: {benchmark.title}\n  {benchmark.about['data']}\n  {benchmark.about['split']}")
        return 0
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
                run = measured(benchmark, work, values / benchmark.name / f"{seed}.json")
                shown = [f"{metric.title} {run.values[metric.key].value:.3f}" for metric in benchmark.metrics]
                print(f"{benchmark.name}, seed {seed}: {', '.join(shown)}", flush=True)
                # With all measured seeds, also of benchmarks that are not chosen now.
                results = {other.name: read_measured(values / other.name) for other in BENCHMARKS}
                write_page(BENCHMARKS, results, arguments.weights, output)
    print(f"page: {output}", file=sys.stderr)
    return 0
