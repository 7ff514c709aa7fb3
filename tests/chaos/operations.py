"""Commands that are killed at a file operation, or whose file operation fails: nothing is lost.

``python -m tests.chaos --phases operations --minutes 15 --only "embed index"``. Each case is a command and the files
before it. A preloaded library, ``operations.cpp``, counts the command's operations: opening for writing, write, rename,
link, unlink, rmdir, mkdir, fsync, chmod, truncate, and uploads to an object store. At one operation the command is
killed, or the operation fails with EIO, ENOSPC or EDQUOT, once or from then on. Then

- a reader must see the old output or the new one;
- a command that failed must report why in one line, and a command that reports success must have written the output;
- the same command, started again, must write the undisturbed command's output, and leave no other files.

Consecutive writes to one file are sampled: the first, the last, and every sixteenth operation.
"""

import ctypes
import errno
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partialmethod
from pathlib import Path
from typing import Any, NamedTuple

from esmeray.common.compiled_code import load
from tests.chaos.cases import BUCKET, CASES, called
from tests.chaos.forks import LIMIT_S, Call, ended

ACTS = {"kill before": 1, "kill after": 2, "once": 3, "from there on": 4}
"""Acts and their numbers in operations.cpp."""
KILLS, ERRORS = ("kill before", "kill after"), ("EIO", "ENOSPC", "EDQUOT")
COLUMNS = ("lost", "wrong end", "not resumed", "left over")
PACKAGES = ("esmeray.", "torch", "transformers", "faiss", "sklearn.", "h5py", "pyarrow.", "matplotlib.")
"""Prefixes of the modules that are imported here once the first fork has needed them."""
LIGHT = ("data convert", "align", "bad")
"""Cases that need no module with a slow import."""
VARYING = (
    r'"(mtime_ns|ctime_ns|inode|created)": .*|, \d+\.\d s|\[[^]]*\] \[WARNING\].*\n|[\w ]+: working\n'
    r"|: (nothing is|no \w+) there.*"
)
"""Parts of the text that differ between runs, and the end of errors about a URI: empty, or without a manifest."""


class Point(NamedTuple):
    """A disturbance: the number of the operation, the act and the error."""

    number: int
    act: str
    error: str = ""

    def __str__(self) -> str:
        return f"{self.error} {self.act}".strip()


class Trial(NamedTuple):
    """The outcome at a point; ``wrong``: descriptions of problems by column of the table."""

    case: str
    point: Point
    operation: str
    wrong: dict[str, str]

    def __str__(self) -> str:
        wrong = "; ".join(f"{column}: {text}" for column, text in self.wrong.items()) or "right"
        return f"{self.case}, {self.point} at {self.point.number} {self.operation}: {wrong}"


class State(NamedTuple):
    """An output as its reader sees it: exit code and printed text."""

    code: int
    text: str


class Subject:
    """A prepared case, its undisturbed result, and the points at which it can be disturbed."""

    def __init__(self, root: Path, name: str, library: Any) -> None:
        self.name, self.case, self.library = name, CASES[name], library
        self.root = root / re.sub(r"\W+", "-", name)
        self.here = self.root / "here"
        self.here.mkdir(parents=True)
        (self.root / "kept").mkdir()
        self.files = [self.root / f"{stream}.txt" for stream in ("stdout", "stderr")]
        self._restore()  # empties the bucket, which all cases share
        for number, work in enumerate(self.case.make):
            assert self._call(called(work)) == 0, f"{name}, {number}: {self._said()}"
        self._pull()
        shutil.copytree(self.here, self.root / "kept", symlinks=True, dirs_exist_ok=True)
        self.old = self._read()
        self.operations = self._undisturbed()
        self.new = self._read()
        self.content = self._content()
        self.names = {generic(path) for path in self.content}
        # What differs between two undisturbed runs, such as a time in seconds, is not compared.
        time.sleep(1.1)
        self._undisturbed()
        self.content = dict(self.content.items() & self._content().items())
        again = self._read()
        assert self.new.code == 0 and self.old != self.new == again, f"{self.old}, {self.new}, {again}"[-2000:]

    def _undisturbed(self) -> list[str]:
        self._restore()
        assert self._run(Point(0, "")) == 0, self._said()
        return [line for line in self._log() if "\t" in line]

    def points(self) -> list[Point]:
        """All points, without most of the consecutive writes to one file."""
        lines = [line.split("\t")[1:3] for line in self.operations]
        around = zip(["", *lines], lines, [*lines[1:], ""], strict=False)
        is_inner = [before == line == after for before, line, after in around]
        numbers = [n for n, line in enumerate(lines, 1) if not (is_inner[n - 1] and line[0] == "write" and n % 16)]
        errors = [(act, error) for error in ERRORS for act in ("once", "from there on")]
        return [Point(number, *act) for number in numbers for act in [*((kill, "") for kill in KILLS), *errors]]

    def trial(self, point: Point) -> Trial:
        self._restore()
        code = self._run(point)
        said = self._said()
        state = self._read()
        operation = next((line.partition("\t")[2] for line in self._log() if line.startswith(f"{point.number}\t")), "")
        wrong = {}
        is_further = self.case.is_staged and state.code == 0 and stage(state) >= stage(self.old)
        # Until a first output is complete, the reader refuses it; the message depends on which files exist.
        is_absent = self.old.code and self.old.code == state.code and "Traceback" not in state.text
        if state not in (self.old, self.new) and not (is_further or is_absent):
            wrong["lost"] = last_lines(state.text)
        if problem := self._wrong_end(point, code, said, state):
            wrong["wrong end"] = problem
        again = self._call(called(self.case.run))
        resaid, final, content = self._said(), self._read(), self._content()
        is_refused = again == 2 and state == self.new and "exists" in resaid
        different = [path for path, expected in self.content.items() if content.get(path) != expected]
        if (again and not is_refused) or final != self.new or different:
            wrong["not resumed"] = f"{again}, {final.code}, {different[:3]}: {last_lines(resaid)}"
        if extra := {generic(path) for path in content} ^ self.names:
            wrong["left over"] = ", ".join(sorted(extra)[:4]) + (f" after {last_lines(resaid)}" if is_refused else "")
        return Trial(self.name, point, operation.replace(f"{self.here}/", "").strip(), wrong)

    def _wrong_end(self, point: Point, code: int, said: str, state: State) -> str:
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        is_killed = code == -signal.SIGKILL and not point.error
        is_refusal = code == 4 and len(errors) == 1 and "/" in errors[0]
        is_right = is_killed or is_refusal or (code == 0 and state == self.new) or (code == 1 and self.case.is_worker)
        return "" if is_right and ("Traceback" not in said or self.case.is_worker) else f"{code}, {last_lines(said)}"

    def _run(self, point: Point) -> int:
        """Run the command in a fork, with its operations counted and disturbed at the point."""
        for name in ("plan", "log.txt"):
            (self.root / name).unlink(missing_ok=True)

        def call() -> Any:
            names = [os.fsencode(self.root / name) for name in ("plan", "here/", "log.txt")]
            if self.case.on_s3:
                count_uploads(self.library)
            self.library.arm(*names, point.number, ACTS.get(point.act, 0), getattr(errno, point.error, 0))
            code = called(self.case.run)()
            (self.root / "modules.txt").write_text("\n".join(sys.modules))
            return code

        return self._call(call)

    def _call(self, call: Call, place: Path | None = None) -> int:
        return ended(call, place or self.here, LIMIT_S, *self.files)

    def _said(self) -> str:
        return self.files[1].read_text(errors="replace")

    def _log(self) -> list[str]:
        log = self.root / "log.txt"
        return log.read_text(errors="replace").splitlines() if log.exists() else []

    def _read(self) -> State:
        """Run the reader in a copy of the folder, so that the folder stays unchanged."""
        look = self.root / "look"
        shutil.rmtree(look, ignore_errors=True)
        shutil.copytree(self.here, look, symlinks=True)
        code = self._call(called(self.case.read), look)
        text = self.files[0].read_text(errors="replace") if code == 0 else self._said()
        return State(code, re.sub(VARYING, "", text))

    def _restore(self) -> None:
        shutil.rmtree(self.here)
        shutil.copytree(self.root / "kept", self.here, symlinks=True)
        if self.case.on_s3:

            def put() -> None:
                files = importlib.import_module("fsspec").filesystem("s3")
                if names := files.find(BUCKET):
                    files.rm(names)
                for path in [path for path in (self.here / BUCKET).rglob("*") if path.is_file()]:
                    files.put_file(str(path), str(path.relative_to(self.here)))
                shutil.rmtree(self.here / BUCKET, ignore_errors=True)

            assert self._call(put) == 0, self._said()

    def _pull(self) -> None:
        """Copy the bucket into the folder."""
        if self.case.on_s3:

            def pull() -> None:
                files = importlib.import_module("fsspec").filesystem("s3")
                for name in files.find(BUCKET):
                    (self.here / name).parent.mkdir(parents=True, exist_ok=True)
                    files.get_file(name, str(self.here / name))

            assert self._call(pull) == 0, self._said()

    def _content(self) -> dict[str, bytes | None]:
        """Contents of files by path, with None for folders."""
        self._pull()
        paths = sorted(self.here.rglob("*"))
        return {str(path.relative_to(self.here)): path.read_bytes() if path.is_file() else None for path in paths}


def count_uploads(library: Any) -> None:
    """Count and disturb the calls that change a bucket, like file operations."""
    from s3fs import S3FileSystem

    for name in ("_put_file", "_pipe_file", "_rm_file", "_bulk_delete", "_cp_file"):
        setattr(S3FileSystem, name, partialmethod(counted_upload, library, getattr(S3FileSystem, name)))


async def counted_upload(files: Any, library: Any, original: Any, *given: Any, **more: Any) -> Any:
    code = library.disturb(original.__name__.encode(), f"s3://{given[:2]}"[:500].encode())
    if code > 0:
        raise OSError(code, os.strerror(code), str(given[-1]))
    result = await original(files, *given, **more)
    if code < 0:
        library.disturb_after()
    return result


def generic(path: str) -> str:
    """Replace the parts of a path that differ between runs; all copies of objects in the cache get one name."""
    return re.sub(r"[0-9a-f]{8,}|\d[\dT-]*", "N", re.sub(r"^cache/files(/\w{24}(\.used|/.*)?)?$", "cache", path))


def last_lines(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-2:])[-300:]


def stage(state: State) -> int:
    """Stage of an output; 0 if there is none."""
    return int(state.text.split()[-1]) if state.code == 0 else 0


def table(trials: list[Trial], counts: dict[str, int]) -> Iterator[str]:
    yield f"| command | operations | kills | errors | {' | '.join(COLUMNS)} |"
    yield "|---" * (4 + len(COLUMNS)) + "|"
    for name in [*counts, "all"]:
        own = [trial for trial in trials if name in (trial.case, "all")]
        kills = sum(not trial.point.error for trial in own)
        wrong = [str(sum(column in trial.wrong for trial in own)) for column in COLUMNS]
        operations = counts.get(name, sum(counts.values()))
        yield f"| {name} | {operations} | {kills} | {len(own) - kills} | {' | '.join(wrong)} |"


def disturbed(
    only: list[str] | None = None, seed: int = 0, minutes: float = 15, most: int | None = None
) -> tuple[list[str], list[str]]:
    """Disturb cases at random points until the time is up; return the lines of the table, and the problems.

    The cases get one point each in turn. ``only``: prefixes of the names of cases; ``most``: maximum of points per
    case.
    """
    names = [name for name in CASES if only is None or name.startswith(tuple(only))]
    library, by_case, counts = ctypes.CDLL(None), dict[str, list[Trial]](), dict[str, int]()
    with tempfile.TemporaryDirectory(prefix="chaos-operations-") as folder, ExitStack() as servers:
        if any(CASES[name].on_s3 for name in names):
            from tests.object_store import object_store

            servers.enter_context(object_store())
        if not all(name.startswith(LIGHT) for name in names):
            importlib.import_module("tests.chaos.bits")
        rounds = []
        for name in names:
            subject = Subject(Path(folder).resolve(), name, library)
            for module in (subject.root / "modules.txt").read_text().split():
                if module.startswith(PACKAGES):
                    with suppress(ImportError):
                        importlib.import_module(module)
            points = subject.points()
            by_case[name] = []
            counts[name] = len(subject.operations)
            random.Random(seed).shuffle(points)
            rounds.append((subject, points[:most]))
            print(f"{name}: {counts[name]} operations, {len(points)} points", flush=True)
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until and any(points for _, points in rounds):
            for subject, points in rounds:
                if points and time.monotonic() < until:
                    by_case[subject.name].append(subject.trial(points.pop()))
                    if by_case[subject.name][-1].wrong:
                        print(by_case[subject.name][-1], flush=True)
    trials = [trial for own in by_case.values() for trial in own]
    return [*table(trials, counts)], [str(trial) for trial in trials if trial.wrong]


def preloaded(module: str = "tests.chaos.operations", **settings: Any) -> tuple[list[str], list[str]]:
    """Call :func:`disturbed` in a process that has preloaded the library."""
    library = load(Path(__file__).with_suffix(".cpp"))
    assert library is not None, "a C++ compiler is needed"
    with tempfile.NamedTemporaryFile("r") as results:
        words = [sys.executable, "-m", module, results.name, json.dumps(settings)]
        subprocess.run(words, env={**os.environ, "LD_PRELOAD": library._name}, check=True)
        lines, wrong = json.load(results)
    return lines, wrong


def main(results: str, settings: str) -> None:
    Path(results).write_text(json.dumps(disturbed(**json.loads(settings))))


if __name__ == "__main__":
    main(*sys.argv[1:])
