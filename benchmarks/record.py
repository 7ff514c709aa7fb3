"""Make an entry of the ten-minute track: a masked LM from random weights on two cores, judged by bits a masked residue.

Any settings of a masked LM may be entered, and any change of the code. The proteins are the UniRef90 sample, in the
parts of benchmarks/harness/split.py, cropped to 510 residues. The clock counts what steps take, waiting for data
included, and stops training after 600 s. Each residue of a judged protein is masked with probability 0.15, by the mask
token alone. Without --enter only the validation part is read; with it the test part is opened, once for a name.

Examples:
  python -m benchmarks record trial --config masked_lm --training.max_steps 50
  python -m benchmarks record "Muon, wsd" --config masked_lm --training.max_steps 1500 --enter
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness.machine import describe_machine, revision, slugify, versions
from benchmarks.harness.stage import Setting
from benchmarks.programs.masked_lm import SEEDS, MaskedLMBench, Point
from esmeray.common.errors import ConfigError
from esmeray.common.progress import status_line
from esmeray.common.publishing import write_atomically
from esmeray.tools.grammar import Command, read_words
from esmeray.training.config import Config, load_config

FOLDER = Path(__file__).resolve().parent
LIMIT_S = 600.0
CORES = 2
HEAD = """# Records of the ten-minute track

`python -m benchmarks record --help` has the rules. Bits a masked residue, means of the seeds; records/ has the logs.

| date | entry | validation | test | of each seed (test) | seconds | tokens | machine | commit |
|---|---|---|---|---|---|---|---|---|
"""


class Arguments(Command, Config):
    """Actions on the settings."""

    name: str
    """Name of the entry."""
    enter: bool = False
    """Open the test part, and write the entry."""


def main(argv: list[str]) -> int:
    """Train by each seed, print what comes out, and with --enter write it down."""
    arguments, overrides = read_words(argv, "record", __doc__, Arguments)
    config = load_config(arguments.config, overrides).model_dump(mode="json")
    log = FOLDER / "records" / f"{slugify(arguments.name)}.json"
    if arguments.enter and log.exists():
        raise ConfigError(f"{arguments.name}: an entry has this name, and opened the test part; give another")
    # Before an hour of training: entries are compared by what they reach in ten minutes of the same two cores.
    if len(os.sched_getaffinity(0)) != CORES:
        raise ConfigError(f"the track is of {CORES} cores: run it by taskset --cpu-list 0,1")
    with tempfile.TemporaryDirectory() as folder, status_line() as show:
        bench = MaskedLMBench.prepare(Setting("cpu", quick=False, folder=Path(folder), note=show))
        test = str(bench.parts["test"]) if arguments.enter else None
        runs = []
        for seed in SEEDS:
            show(f"seed {seed}")
            points = bench.points(
                "train_ours", config=config, seed=seed, store=str(bench.store), limit_s=LIMIT_S, test=test
            )
            ends = [f"{point.part} {point.bits:.4f} bits after {point.seconds:.0f} s" for point in points]
            print(f"seed {seed}: {', '.join(ends)}", flush=True)
            runs.append(points)
    if arguments.enter:
        _enter(arguments.name, config, runs, log)
    return 0


def _enter(name: str, config: dict[str, Any], runs: list[list[Point]], log: Path) -> None:
    machine = describe_machine()
    validation = [point.bits for run in runs for point in run if point.part == "validation"]
    ends = [run[-1] for run in runs]  # of the test part
    values = [
        datetime.now(UTC).strftime("%Y-%m-%d"),
        name,
        f"{mean(validation):.4f}",
        f"{mean(end.bits for end in ends):.4f}",
        " ".join(f"{end.bits:.4f}" for end in ends),
        f"{mean(end.seconds for end in ends):.0f}",
        f"{mean(end.tokens for end in ends):,.0f}",
        machine.slug,
        revision(),
    ]
    entry = {
        "name": name,
        "commit": revision(),
        "seeds": SEEDS,
        "points": runs,
        "config": config,
        "machine": machine.model_dump(),
        "versions": versions(["deepspeed"]),
    }
    log.parent.mkdir(exist_ok=True)
    # The log before the table: a name whose test part was opened must not be entered again.
    write_atomically(log, json.dumps(entry, indent=1, default=asdict).encode())
    table = FOLDER / "records.md"
    text = table.read_text(encoding="utf-8") if table.exists() else HEAD
    write_atomically(table, f"{text}| {' | '.join(values)} |\n".encode())
    print(f"entered: {table}", file=sys.stderr)
