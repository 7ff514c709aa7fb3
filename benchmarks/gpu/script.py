"""Check and time everything that runs on a GPU, most important first; results are on disk after each row.

Needs torch, transformers, NumPy, pydantic, and what esmeray/model/ and esmeray/dataset/ import; no Ray, no DeepSpeed,
no network and no data. Weights are random: no value depends on them. Batches come from the embedded sample, as in
training.

Examples:
  python -m benchmarks gpu
  python -m benchmarks gpu --part correctness training --output results
  python -m benchmarks gpu --device cpu --sizes tiny --tokens 2048 --backend eager
"""

import argparse
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.bench import SIZES, Bench
from benchmarks.gpu.parts import alignment, correctness, forward
from benchmarks.gpu.training import ceilings, profile, training
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.runner import Run, run_stages
from benchmarks.harness.stage import Row, Setting, Stage
from esmeray.common.errors import ConfigError

# The most important first: a machine with a GPU is often available for minutes only.
_IN_ORDER = (correctness, ceilings, training, forward, alignment, profile)
PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {part.__name__: part for part in _IN_ORDER}


def parsed(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = partial(parser.add_argument, metavar="VALUE")
    add("--part", nargs="*", choices=PARTS, help="parts to run, all if none is named: " + ", ".join(PARTS))
    add("--output", type=Path, default=Path("gpu-results"), help="folder of results.json and results.md")
    add("--device", default="cuda", help="cuda, or cpu to try the script")
    sizes = ["8M", "650M", "150M", "3B"]
    add("--sizes", nargs="*", choices=SIZES, default=sizes, help="sizes of ESM-2, in order; 'tiny' to try")
    add("--tokens", type=int, default=65_536, help="token budget of a forward pass; training takes half of it")
    add("--backend", default="inductor", help="of torch.compile; 'eager' traces alone, to try the script")
    add("--minutes", type=float, default=8.0, help="no part and no row of one starts later than this")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the parts; return 1 if one broke or computed something wrong."""
    arguments = parsed(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no GPU is visible: see esmeray profile gpu; --device cpu tries the script without one")
    bench = Bench(arguments.device, arguments.sizes, arguments.tokens, arguments.backend)
    # Parts are stages, so that one runner writes and reports both.
    command = shlex.join(["python", "-m", "benchmarks", "gpu", *argv])
    run = Run(describe_machine(), arguments.output, False, command, minutes=arguments.minutes)
    stages = [
        Stage(name, (PARTS[name].__doc__ or "").strip(), partial(_rows, name, bench))
        for name in arguments.part or PARTS
    ]
    return run_stages(stages, run)


def _rows(part: str, bench: Bench, _: Setting) -> Iterator[Row]:
    """Yield a part's rows, then reset what it changed, and release the device's memory and compiled code."""
    try:
        yield from PARTS[part](bench)
    finally:
        # Also after a part that broke: the memory that it holds would make the next one fail, too.
        torch._dynamo.reset()
        if bench.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.empty_cache()
