"""Check and time what runs on a GPU, most important first; results are on disk after each part.

Needs torch, transformers, NumPy, pydantic, and what model/ and dataset/ import; no Ray, no DeepSpeed, no network and no
data. Weights are random: no value depends on them. Batches are those of training, of the embedded sample.

Examples:
  python -m benchmarks gpu
  python -m benchmarks gpu --part correctness training --output results
  python -m benchmarks gpu --device cpu --sizes tiny --tokens 2048 --backend eager
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import tyro

from benchmarks.gpu.alignment import alignment
from benchmarks.gpu.bench import Arguments, Bench, Row
from benchmarks.gpu.ceilings import ceilings
from benchmarks.gpu.correctness import correctness
from benchmarks.gpu.forward import forward
from benchmarks.gpu.kernels import kernels
from benchmarks.gpu.production import production
from benchmarks.gpu.profile import profile
from benchmarks.gpu.proteome import proteome
from benchmarks.gpu.structures import structures
from benchmarks.gpu.training import budgets, training
from benchmarks.harness.machine import describe_machine, revision, versions
from common.errors import ConfigError
from common.publishing import write_atomically
from common.text import did_you_mean

PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    part.__name__: part
    for part in (
        correctness,
        ceilings,
        training,
        forward,
        proteome,
        structures,
        alignment,
        kernels,
        profile,
        budgets,
        production,
    )
}


def parsed(argv: list[str]) -> Arguments:
    """Read the command line. Raises ConfigError for a part that is not there."""
    arguments = tyro.cli(Arguments, args=argv, prog="python -m benchmarks gpu", description=__doc__)
    for name in arguments.part:
        if name not in PARTS:
            raise ConfigError(f"--part: no part {name!r}{did_you_mean(name, PARTS)}; there are {', '.join(PARTS)}")
    return arguments


def main(argv: list[str]) -> int:
    """Run the parts; returns 1 where one broke or found something wrong."""
    arguments = parsed(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no GPU is seen: see python -m tools gpu_check; --device cpu tries the script without one")
    bench, deadline = Bench(arguments), time.perf_counter() + 60 * arguments.minutes
    for name in arguments.part or PARTS:
        if time.perf_counter() > deadline:
            print(f"{name}: left out, {arguments.minutes:g} minutes are over", file=sys.stderr)
            continue
        _run(bench, name, deadline)
    wrong = [name for name, part in bench.parts.items() if part["error"] or "WRONG" in json.dumps(part["rows"])]
    if wrong:
        print(f"broken or wrong: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def _run(bench: Bench, name: str, deadline: float) -> None:
    """Run a part, or what of it begins in time; rows are printed and written as they come, and so is what breaks it."""
    part: dict[str, Any] = {"summary": (PARTS[name].__doc__ or "").strip(), "rows": [], "error": None}
    bench.parts[name] = part
    print(f"{name}: {part['summary']}", flush=True)
    began = time.perf_counter()
    try:
        for row in PARTS[name](bench):
            part["rows"].append(row)
            print("  " + ", ".join(f"{key} {_shown(value)}" for key, value in row.items()), flush=True)
            _write(bench)
            if time.perf_counter() > deadline:
                print(f"{name}: cut short, the minutes are over", file=sys.stderr)
                break
    except Exception:  # noqa: BLE001 - the next parts are worth their time all the same
        part["error"] = traceback.format_exc()
        print(part["error"], file=sys.stderr)
    part["seconds"] = time.perf_counter() - began
    _write(bench)
    torch._dynamo.reset()
    if bench.device == "cuda":
        torch.cuda.empty_cache()


def _write(bench: Bench) -> None:
    machine = describe_machine()
    result = {
        "machine": machine.model_dump(),
        "versions": versions([]),
        "revision": revision(),
        "arguments": bench.arguments.model_dump(mode="json"),
        "parts": bench.parts,
    }
    bench.arguments.output.mkdir(parents=True, exist_ok=True)
    write_atomically(bench.arguments.output / "gpu.json", json.dumps(result, indent=1) + "\n")
    lines = [f"# {machine.gpu or machine.cpu}", "", f"Revision {result['revision']}, {result['versions']}."]
    for name, part in bench.parts.items():
        lines += ["", f"## {name}", "", part["summary"], ""]
        columns = list(dict.fromkeys(key for row in part["rows"] for key in row))
        if columns:
            lines += [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
            lines += [f"| {' | '.join(_shown(row.get(key)) for key in columns)} |" for row in part["rows"]]
        if part["error"]:
            lines += ["", "```", part["error"], "```"]
    write_atomically(bench.arguments.output / "gpu.md", "\n".join(lines) + "\n")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)
