"""Check and time what runs on a GPU, most important first; results are on disk after each row.

Needs torch, transformers, NumPy, pydantic, and what model/ and dataset/ import; no Ray, no DeepSpeed, no network and no
data. Weights are random: no value depends on them. Batches are those of training, of the embedded sample.

Examples:
  python -m benchmarks gpu
  python -m benchmarks gpu --part correctness training --output results
  python -m benchmarks gpu --device cpu --sizes tiny --tokens 2048 --backend eager
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator

import torch
import tyro

from benchmarks.gpu.alignment import alignment
from benchmarks.gpu.bench import Arguments, Bench
from benchmarks.gpu.ceilings import ceilings
from benchmarks.gpu.correctness import correctness
from benchmarks.gpu.forward import forward
from benchmarks.gpu.kernels import kernels
from benchmarks.gpu.profile import profile
from benchmarks.gpu.training import budgets, training
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.runner import Run, run_stages
from benchmarks.harness.stage import Row, Setting, Stage
from common.errors import ConfigError
from common.text import did_you_mean

_IN_ORDER = (correctness, ceilings, training, forward, alignment, kernels, profile, budgets)
PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {part.__name__: part for part in _IN_ORDER}


def main(argv: list[str]) -> int:
    """Run the parts; returns 1 where one broke or computed something wrong."""
    arguments = tyro.cli(Arguments, args=argv, prog="python -m benchmarks gpu", description=__doc__)
    for name in arguments.part:
        if name not in PARTS:
            raise ConfigError(f"--part: no part {name!r}{did_you_mean(name, PARTS)}; there are {', '.join(PARTS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no GPU is seen: see esmeray profile gpu; --device cpu tries the script without one")
    bench = Bench(arguments)
    command = shlex.join(["python", "-m", "benchmarks", "gpu", *argv])
    run = Run(describe_machine(), arguments.output, False, command, list(PARTS), minutes=arguments.minutes)
    broken = run_stages([_stage(name, bench) for name in arguments.part or PARTS], run)
    print(f"results: {arguments.output}/results.md and results.json")
    return 1 if broken else 0


def _stage(name: str, bench: Bench) -> Stage:
    """A part as a stage, after which the device's memory and what was compiled are given back."""

    def rows(_: Setting) -> Iterator[Row]:
        try:
            yield from PARTS[name](bench)
        finally:
            torch._dynamo.reset()
            if bench.device == "cuda":
                torch.cuda.empty_cache()

    return Stage(name, (PARTS[name].__doc__ or "").strip(), rows)
