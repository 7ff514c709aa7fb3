"""A job: work in a folder that one process does at a time, that a killed one leaves behind, and that the same command
resumes.

``held`` is the lock on the folder, ``differences`` says in which settings two jobs differ, in words. An output that
appears once it is complete is made in ``OUTPUT.partial`` (``unfinished``): ``made_by.txt`` in it has the command, and
without it a folder of that name is somebody else's; ``job.json`` is the job's identity, everything that the result
depends on, ``accept`` refuses the work of another one, and ``journal`` has the results of its pieces. A run of training
has its ``config.yaml`` and ``outcome.json`` for these (:mod:`esmeray.run_folder.paths`).
"""

import fcntl
import json
import logging
import os
import socket
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import xxhash

from esmeray.common.errors import ConfigError, DataError, DiskFullError, EsmerayError, ResourceError, read_json
from esmeray.common.publishing import (
    MADE_FILE,
    PARTIAL,
    RECORD_FILE,
    discard,
    recover,
    refuse_other_user,
    resolved,
    take_lock,
    write_atomically,
    writing,
)
from esmeray.common.remote import listing, remove, retried, upload

log = logging.getLogger(__name__)

JOB_FILE, LOCK_FILE, JOURNAL_FILE = "job.json", ".lock", "done.tsv"
PIECES = "rows"
"""Folder with a file for each piece that is done, of a job whose results are too large for a journal."""
REMEDY = "choose another output, or remove this folder"
PATIENCE_S = 0.5
"""A live view of a run holds its lock for a moment now and then."""


class Difference(NamedTuple):
    """A setting by its dotted key, and its values in two jobs."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} was {self.old!r}, is now {self.new!r}"

    def within(self, names: tuple[str, ...]) -> bool:
        """Test for a key that is one of these or belongs to one of these sections."""
        return any(self.key == name or self.key.startswith(f"{name}.") for name in names)


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[Difference]:
    """Settings of the new job whose values differ, sections compared setting by setting."""
    changes: list[Difference] = []
    for name, value in new.items():
        key, before = f"{prefix}{name}", old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            changes += differences(before, value, f"{key}.")
        elif before != value:
            changes.append(Difference(key, before, value))
    return changes


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a second process from the folder, which is made. One with nothing but the lock is removed at the end.

    Raises ResourceError where another process holds it, or it can't be written.
    """
    path = folder / LOCK_FILE
    with writing(folder):
        if folder.exists():
            refuse_other_user(folder, folder.stat())
        try:
            lock = take_lock(path, PATIENCE_S)
        except BlockingIOError as error:
            holder = path.read_text(errors="replace").strip()
            raise ResourceError(
                f"{folder}: process {holder} works on it: wait for it, or choose another name"
            ) from error
    try:
        with writing(folder):
            lock.write(f"{os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        with suppress(OSError):
            if [*folder.iterdir()] == [path]:  # the command was refused before it began
                path.unlink()  # while it is held: whoever waits sees the file gone
                folder.rmdir()
        lock.close()


def lock_state(folder: Path) -> Literal["held", "left", "unknown"]:
    """State of a folder's lock: its process, of this host, holds it, or has ended.

    A lock that another host holds may not be seen through shared storage; the file ends in that host's name.
    """
    try:
        with (folder / LOCK_FILE).open() as file:
            if file.read().split()[-1:] != [socket.gethostname()]:
                return "unknown"
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError:  # no such file, or a storage without locks
        return "unknown"
    return "left"


@contextmanager
def unfinished(output: Path, made_by: str, uri: str | None = None) -> Iterator[Path]:
    """The folder of the work on an output, held; removed when the block ends, or where it raises with nothing to keep.

    ``made_by``: the command, in other words where it can't resume the work of one of the same name. ``uri``: of the
    output, where other nodes have the work, too. Raises ConfigError where something else has the folder's name, which
    is left as it is: what does not hold this command's record, this command did not make.
    """
    output = resolved(output)
    recover(output)
    folder = output.with_name(f"{output.name}{PARTIAL}")
    shared = f"{uri}{PARTIAL}"
    record = folder / RECORD_FILE
    # All is refused before the lock is taken, which would leave a file in what is somebody else's.
    shared_names = retried(lambda: listing(shared), shared) if uri else {}
    refuse_foreign(shared, shared_names, RECORD_FILE)
    if folder.is_dir():
        refuse_foreign(folder, [path.name for path in folder.iterdir()], RECORD_FILE)
    if record.is_file() and record.read_text(errors="replace") != made_by:
        raise other_job(folder, f"of {record.read_text(errors='replace')}, this is {made_by}", REMEDY)
    with held(folder):
        # Under the lock: a process that ended just now may have removed the folder, or left its work.
        is_new = not (record.exists() or RECORD_FILE in shared_names)
        is_finished = is_refused = False
        try:
            with writing(record):
                write_atomically(record, made_by)
            if uri:
                retried(lambda: upload(record, f"{shared}/{RECORD_FILE}"), shared)
            yield folder
            is_finished = True
        except (ConfigError, DataError):
            is_refused = is_new
            raise
        except DiskFullError as error:
            if not _has_pieces(folder):
                raise
            raise DiskFullError(
                f"{error}; what is done stays in {folder}, and the same command resumes once there is room"
            ) from error
        finally:
            is_accepted = any([*folder.glob(JOB_FILE), *folder.glob(f"*/{JOB_FILE}")])
            # Refused before anything was computed, a job would only be in the way of the one that is mended.
            is_useless = is_refused and not _has_pieces(folder)
            if is_finished or is_useless or not is_accepted:
                discard(folder, output)
                # What was there before this start may be work that it did not get to see.
                if uri and (is_finished or is_new):
                    with suppress(EsmerayError):  # the store is away: what stays there has its record
                        retried(lambda: remove(shared, RECORD_FILE), shared)


def refuse_foreign(folder: Path | str, names: Collection[str], record: str) -> None:
    """Raise ConfigError for a folder that is not empty and lacks what each of Esmeray's folders has, its ``record``."""
    # A process that was killed as it began left no more than these.
    others = [name for name in names if not name.startswith((LOCK_FILE, f".{RECORD_FILE}."))]
    if others and record not in names:
        raise ConfigError(f"{folder}: is in the way, and was not made by Esmeray; move it away, or choose another name")


def _has_pieces(folder: Path) -> bool:
    """Test for results of a job's pieces, or of a job that it began in its folder."""
    patterns = (JOURNAL_FILE, f"{PIECES}/*.json", MADE_FILE)
    return any(path.stat().st_size for pattern in patterns for path in folder.rglob(pattern))


def accept(folder: Path, job: dict[str, Any], name: str = JOB_FILE) -> None:
    """Begin a job in its unfinished folder, or resume it. Raises ConfigError where the work there is of another."""
    path = folder / name
    text = json.dumps(job, indent=1) + "\n"
    if path.is_file():
        before = read_json(path, f"remove {path.parent}, the unfinished work")
        # Both as JSON gives them: a tuple in a setting would differ from the list that is read.
        if changes := differences(before, json.loads(text)):
            raise other_job(folder, changes[0], REMEDY)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)


def other_job(folder: Path, difference: Difference | str, remedy: str) -> ConfigError:
    """The refusal of a folder that holds the work of another job."""
    return ConfigError(f"{folder}: holds the work of another job ({difference}); {remedy}")


class Journal:
    """Results of the ``done`` pieces of a job, in its unfinished folder until all are.

    A text file: the lines of each piece, and one with a tab and the XXH3-128 of all lines up to it. What is damaged,
    and all behind it, is computed again, as is a piece that a kill cut short.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.done = end = 0
        self._file = file
        self._digest = xxhash.xxh3_128()
        for self.done, (_, self._digest) in enumerate(_pieces(file), 1):
            end = file.tell()
        rest = file.seek(0, os.SEEK_END) - end
        if rest:
            log.warning("%s: %d bytes behind piece %d are computed again", path, rest, self.done)
        file.seek(end)
        file.truncate()

    def add(self, lines: Iterable[str]) -> None:
        """Append the lines of the next piece, none of them empty, none that begins with a tab."""
        piece = "".join(f"{line}\n" for line in lines).encode()
        self._digest.update(piece)
        # In one write, flushed: a killed process loses the piece that it was at, and no other.
        with writing(self.path):
            self._file.write(piece + f"\t{self._digest.hexdigest()}\n".encode())
            self._file.flush()
        self.done += 1

    def lines(self) -> Iterator[str]:
        """All lines of all pieces, in order, with their line feeds. Raises DataError where they are damaged by now."""
        done = 0
        with self.path.open("rb") as file:
            for lines, _ in _pieces(file):
                yield from (line.decode() for line in lines)
                done += 1
        if done < self.done:
            raise DataError(f"{self.path}: damaged in piece {done + 1}; start the same command again")


def _pieces(file: BinaryIO) -> Iterator[tuple[list[bytes], Any]]:
    """The lines of each piece, and the digest of all up to its end; ends at the first that is not sound."""
    digest = xxhash.xxh3_128()
    lines: list[bytes] = []
    while line := file.readline():
        # Lines begin with no tab, which marks the end of a piece: no count has to be believed.
        if not line.startswith(b"\t"):
            digest.update(line)
            lines.append(line)
        elif line == f"\t{digest.hexdigest()}\n".encode():
            yield lines, digest.copy()
            lines = []
        else:
            return


@contextmanager
def journal(folder: Path) -> Iterator[Journal]:
    """Open or begin the journal of the job that the folder was accepted for."""
    path = folder / JOURNAL_FILE
    with writing(path):
        path.touch()
        with path.open("r+b") as file:
            yield Journal(path, file)
