"""Inputs for a reader in processes of their own: each within a gigabyte and ten seconds of a core, a crash is noticed.

An input is named by reader, seed and number, from which it is made again.
"""

import faulthandler
import multiprocessing
import os
import random
import resource
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from esmeray.common.errors import EsmerayError
from tests.fuzz.mutations import mutated
from tests.fuzz.readers import READERS

MEMORY_BYTES, TIME_S = 1 << 30, 10
_HANGS_S = 120
_LONGEST_LINE = 2000
_FAILURES_ENOUGH = 20
_fork = multiprocessing.get_context("fork")


@dataclass
class Outcome:
    """Numbers of results and refusals, and each failure's number and description."""

    inputs: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)


def input_of(name: str, seeds: list[bytes], seed: int, number: int) -> bytes:
    return mutated(seeds, random.Random(f"{name} {seed} {number}"), READERS[name].may_be_gzip)


def fuzz(name: str, inputs: int, seed: int, saved: Path | None = None) -> Outcome:
    """Read ``inputs`` mutated files; those that fail are written to ``saved``."""
    outcome = Outcome()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as scratch:
        folder = Path(scratch)
        seeds = READERS[name].seeds(folder)
        while len(outcome.failures) < _FAILURES_ENOUGH:
            problem = _run(name, seeds, seed, inputs, folder, outcome)
            if problem is None:
                break
            number = outcome.inputs
            outcome.failures[number] = problem
            outcome.inputs += 1
            if saved is not None:
                saved.mkdir(parents=True, exist_ok=True)
                file = saved / f"{name.replace(' ', '_')}-{seed}-{number}-{READERS[name].file}"
                file.write_bytes(input_of(name, seeds, seed, number))
    return outcome


def _run(name: str, seeds: list[bytes], seed: int, inputs: int, folder: Path, outcome: Outcome) -> str | None:
    """One process, from the first input that was not read to the first that fails; says how it failed."""
    ours, its = _fork.Pipe(duplex=False)
    process = _fork.Process(target=_read_all, args=(name, seeds, seed, outcome.inputs, inputs, folder, its))
    process.start()
    its.close()
    try:
        while True:
            if not ours.poll(_HANGS_S):  # it waits, or a parser in C does not return to Python for the signal
                return f"no result within {_HANGS_S} s"
            kind, problem = ours.recv()
            if kind in ("end", "failure"):
                return problem
            outcome.counts[kind] += 1
            outcome.inputs += 1
    except EOFError:
        process.join()
        return f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
        ours.close()


def _read_all(name: str, seeds: list[bytes], seed: int, start: int, inputs: int, folder: Path, connection: Any) -> None:
    warnings.simplefilter("ignore")
    faulthandler.disable()  # pytest's, which would print where the process crashed
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _too_long)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    path = folder / READERS[name].file
    for number in range(start, inputs):
        # A new file: the one before may still be mapped.
        path.unlink(missing_ok=True)
        path.write_bytes(input_of(name, seeds, seed, number))
        connection.send(_outcome_of(name, path))
    connection.send(("end", None))


def _outcome_of(name: str, path: Path) -> tuple[str, str | None]:
    """``result``, ``refusal`` or ``failure``, and how it failed."""
    begun_s = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, TIME_S)  # of the process: others may have the cores
    try:
        READERS[name].read(path)
    except EsmerayError as error:
        if any("\n" in problem or len(problem) > _LONGEST_LINE for problem in error.problems):
            return "failure", f"a refusal of more than a line: {str(error)[:300]!r}"
        return "refusal", None
    except BaseException as error:  # noqa: BLE001 - whatever else a reader raises is what is looked for
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if ".venv" not in frame.filename][-1]
        where = ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in (own, frames[-1]))
        return "failure", f"{type(error).__name__}: {str(error)[:200]} at {where}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    # An error that was raised in a callback of C may have been swallowed there.
    is_late = time.process_time() - begun_s > TIME_S
    return ("failure", f"more than {TIME_S} s") if is_late else ("result", None)


def _too_long(number: int, frame: Any) -> None:
    raise TimeoutError(f"more than {TIME_S} s")
