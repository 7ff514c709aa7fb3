"""Run a reader on mutated inputs in child processes, with a gigabyte of memory and ten seconds of CPU time per input.

A crash is a failure. Reader, seed and number identify an input and reproduce it.
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
    """Number of results and refusals, and the number and description of each failing input."""

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
    """Run a process from the first unread input until one fails; return a description of the failure."""
    ours, its = _fork.Pipe(duplex=False)
    process = _fork.Process(target=_read_all, args=(name, seeds, seed, outcome.inputs, inputs, folder, its))
    process.start()
    its.close()
    try:
        while True:
            if not ours.poll(_HANGS_S):  # it waits, or it is in C code, where Python does not handle the signal
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
    faulthandler.disable()  # pytest enables it: it would print a traceback of each crash
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _too_long)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    path = folder / READERS[name].file
    for number in range(start, inputs):
        # Write a new file: the previous one may still be mapped.
        path.unlink(missing_ok=True)
        path.write_bytes(input_of(name, seeds, seed, number))
        connection.send(_outcome_of(name, path))
    connection.send(("end", None))


def _outcome_of(name: str, path: Path) -> tuple[str, str | None]:
    """Return ``result``, ``refusal`` or ``failure``, and a description of the failure."""
    begun_s = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, TIME_S)  # CPU time: the cores may be busy
    try:
        READERS[name].read(path)
    except EsmerayError as error:
        if any("\n" in problem or len(problem) > _LONGEST_LINE for problem in error.problems):
            return "failure", f"a refusal of more than a line: {str(error)[:300]!r}"
        return "refusal", None
    except BaseException as error:  # noqa: BLE001 - any other exception of a reader is a failure
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if ".venv" not in frame.filename][-1]
        where = ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in (own, frames[-1]))
        return "failure", f"{type(error).__name__}: {str(error)[:200]} at {where}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    # C code may have swallowed an error that was raised in its callback.
    is_late = time.process_time() - begun_s > TIME_S
    return ("failure", f"more than {TIME_S} s") if is_late else ("result", None)


def _too_long(number: int, frame: Any) -> None:
    raise TimeoutError(f"more than {TIME_S} s")
