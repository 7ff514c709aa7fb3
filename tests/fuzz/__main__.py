"""Mutated files for every reader of foreign files: ``python -m tests.fuzz --inputs 100000 --readers PDB OBO --seed 1``.

Each input must be read or refused in one line, within a gigabyte of memory and ten seconds of CPU time. Failing inputs
are written to a folder, and the exit code is 1.
"""

import argparse
import sys
import time
from pathlib import Path

from tests.fuzz.processes import fuzz
from tests.fuzz.readers import READERS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="of each reader")
    parser.add_argument("--readers", nargs="*", choices=READERS, default=list(READERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="folder for inputs that fail")
    arguments = parser.parse_args()
    failures = 0
    print(f"{'reader':20} {'inputs':>8} {'results':>8} {'refusals':>8} {'failures':>8} {'seconds':>8}", flush=True)
    for name in arguments.readers:
        begun_s = time.monotonic()
        outcome = fuzz(name, arguments.inputs, arguments.seed, arguments.failures)
        counts = f"{outcome.counts['result']:8,} {outcome.counts['refusal']:8,} {len(outcome.failures):8,}"
        print(f"{name:20} {outcome.inputs:8,} {counts} {time.monotonic() - begun_s:8.0f}", flush=True)
        for number, problem in outcome.failures.items():
            print(f"  input {number}: {problem}", flush=True)
        failures += len(outcome.failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
