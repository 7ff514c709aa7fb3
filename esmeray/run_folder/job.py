"""A job: work in a folder, done by one process at a time and resumed by the same command after an interruption.

``held`` locks the folder. ``differences`` lists the settings in which two jobs differ. An output that appears once it
is complete is created in ``OUTPUT.partial`` (``unfinished``), which contains:

- ``made_by.txt``: the command. A folder of that name without it is not Esmeray's.
- ``job.json``: the job's identity, i.e. everything that the result depends on. ``accept`` refuses the work of another
  job.
- the results of the job's pieces (``journal``).

A training run has ``config.yaml`` and ``outcome.json`` instead (:mod:`esmeray.run_folder.paths`).
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
from esmeray.run_folder.metrics_log import decode_record, encode_record

log = logging.getLogger(__name__)

JOB_FILE, LOCK_FILE, JOURNAL_FILE = "job.json", ".lock", "done.jsonl"
PIECES = "rows"
"""Folder with one file per finished piece, for jobs whose results are too large for a journal."""
REMEDY = "choose another output, or remove this folder"
PATIENCE_S = 0.5
"""Seconds to wait for a lock: a live view of a run briefly holds it now and then."""


class Difference(NamedTuple):
    """A setting by its dotted key, and its values in two jobs."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} was {self.old!r}, is now {self.new!r}"

    def within(self, names: tuple[str, ...]) -> bool:
        """Test whether the key is one of these names or belongs to one of these sections."""
        return any(self.key == name or self.key.startswith(f"{name}.") for name in names)


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[Difference]:
    """List the settings of the new job whose values differ; sections are compared setting by setting."""
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
    """Lock the folder against other processes. It is created if missing, and removed at the end if only the lock is in
    it.

    Raises ResourceError if another process holds the lock, or the folder can't be written.
    """
    path = folder / LOCK_FILE
    with writing(folder):
        if folder.exists():
            refuse_other_user(folder, folder.stat())
        try:
            lock = take_lock(path, PATIENCE_S)
        except BlockingIOError as error:
            holder = path.read_text(errors="replace").strip()
            raise ResourceError(f"{folder}: in use by process {holder}: wait for it, or choose another name") from error
    try:
        with writing(folder):
            lock.write(f"{os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        with suppress(OSError):
            if [*folder.iterdir()] == [path]:  # the command was refused before it started
                path.unlink()  # while the lock is held: a waiting process detects that the file is gone
                folder.rmdir()
        lock.close()


def lock_state(folder: Path) -> Literal["held", "left", "unknown"]:
    """State of a folder's lock: held by a living process of this host, left by one that has ended, or unknown.

    Locks of other hosts may be invisible on shared storage; then the file ends in the other host's name.
    """
    try:
        with (folder / LOCK_FILE).open() as file:
            if file.read().split()[-1:] != [socket.gethostname()]:
                return "unknown"
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError:  # no such file, or a file system without locks
        return "unknown"
    return "left"


@contextmanager
def unfinished(output: Path, made_by: str, uri: str | None = None) -> Iterator[Path]:
    """Yield the locked folder of unfinished work on an output.

    It is removed when the block ends, or when the block raises and there is nothing to keep.

    ``made_by``: the command. It must differ for commands that can't resume each other's work. ``uri``: URI of the
    output, if other nodes share the work. Raises ConfigError if the folder lacks this command's record; the folder is
    then not changed.
    """
    output = resolved(output)
    recover(output)
    folder = output.with_name(f"{output.name}{PARTIAL}")
    shared = f"{uri}{PARTIAL}"
    record = folder / RECORD_FILE
    # All checks come before taking the lock, which would create a file in a folder that is not Esmeray's.
    shared_names = retried(lambda: listing(shared), shared) if uri else {}
    refuse_foreign(shared, shared_names, RECORD_FILE)
    if folder.is_dir():
        refuse_foreign(folder, [path.name for path in folder.iterdir()], RECORD_FILE)
    if record.is_file() and record.read_text(errors="replace") != made_by:
        raise other_job(folder, f"of {record.read_text(errors='replace')}, not {made_by}", REMEDY)
    with held(folder):
        # Check under the lock: a process that just ended may have removed the folder, or left its work.
        is_new = not (record.exists() or RECORD_FILE in shared_names)
        # The type only: an exception's traceback would keep the caller's arrays in memory.
        failure: type[BaseException] | None = None
        try:
            with writing(record):
                write_atomically(record, made_by)
            if uri:
                retried(lambda: upload(record, f"{shared}/{RECORD_FILE}"), shared)
            yield folder
        except BaseException as error:  # interruptions too
            failure = type(error)
            if not (isinstance(error, DiskFullError) and _has_pieces(folder)):
                raise
            raise DiskFullError(
                f"{error}; finished work is kept in {folder}; free some space, then resume with the same command"
            ) from error
        finally:
            is_accepted = any([*folder.glob(JOB_FILE), *folder.glob(f"*/{JOB_FILE}")])
            # A job that was refused before it computed anything would only block the corrected command.
            is_refused = is_new and failure is not None and issubclass(failure, (ConfigError, DataError))
            is_useless = is_refused and not _has_pieces(folder)
            if failure is None or is_useless or not is_accepted:
                discard(folder, output)
                # Files from before this start may be work that this process has not seen.
                if uri and (failure is None or is_new):
                    with suppress(EsmerayError):  # the store is unreachable: the remaining files keep their record
                        retried(lambda: remove(shared, RECORD_FILE), shared)


def refuse_foreign(folder: Path | str, names: Collection[str], record: str) -> None:
    """Raise ConfigError if a folder is not empty and lacks the ``record`` that all folders of Esmeray have."""
    # A process that was killed at its start leaves only these files.
    others = [name for name in names if not name.startswith((LOCK_FILE, f".{RECORD_FILE}."))]
    if others and record not in names:
        raise ConfigError(
            f"{folder}: already exists and was not written by Esmeray; move it away, or choose another name"
        )


def _has_pieces(folder: Path) -> bool:
    """Test for results of a job's pieces, also of jobs in subfolders."""
    patterns = (JOURNAL_FILE, f"{PIECES}/*.json", MADE_FILE)
    return any(path.stat().st_size for pattern in patterns for path in folder.rglob(pattern))


def accept(folder: Path, job: dict[str, Any], name: str = JOB_FILE) -> None:
    """Start a job in its unfinished folder, or resume it. Raises ConfigError if the folder holds another job's work."""
    path = folder / name
    text = json.dumps(job, indent=1) + "\n"
    if path.is_file():
        before = read_json(path, f"remove the unfinished work in {path.parent}")
        # Compare both after a JSON round trip: otherwise a tuple in a setting would differ from the list that is read.
        if changes := differences(before, json.loads(text)):
            raise other_job(folder, changes[0], REMEDY)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)


def other_job(folder: Path, difference: Difference | str, remedy: str) -> ConfigError:
    """Return the error for a folder that holds the work of another job."""
    return ConfigError(f"{folder}: contains the work of another job ({difference}); {remedy}")


class Journal:
    """Results of a job's pieces, in its unfinished folder. ``done``: number of finished pieces.

    A file with a record per piece (:mod:`esmeray.run_folder.metrics_log`), whose checksum detects damage. A damaged or
    truncated piece, and all pieces after it, are computed again.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.done = end = 0
        self._file = file
        for self.done, _ in enumerate(_pieces(file), 1):
            end = file.tell()
        rest = file.seek(0, os.SEEK_END) - end
        if rest:
            log.warning("%s: %d damaged bytes after piece %d; the rest is computed again", path, rest, self.done)
        file.seek(end)
        file.truncate()

    def add(self, lines: Iterable[str]) -> None:
        """Append the lines of the next piece."""
        piece = encode_record({"piece": self.done, "lines": [*lines]})
        # A single flushed write: a killed process loses only its current piece.
        with writing(self.path):
            self._file.write(piece)
            self._file.flush()
        self.done += 1

    def lines(self) -> Iterator[str]:
        """Yield all lines of all pieces in order, with newlines. Raises DataError if they were damaged in the
        meantime."""
        done = 0
        with self.path.open("rb") as file:
            for lines in _pieces(file):
                yield from (f"{line}\n" for line in lines)
                done += 1
        if done < self.done:
            raise DataError(f"{self.path}: damaged in piece {done + 1}; run the same command again")


def _pieces(file: BinaryIO) -> Iterator[list[str]]:
    """Yield the lines of each piece, up to the first that is damaged, missing or repeated."""
    with suppress(ValueError):
        for number, record in enumerate(iter(file.readline, b"")):
            piece = decode_record(record)
            if piece["piece"] != number:
                return
            yield piece["lines"]


@contextmanager
def journal(folder: Path) -> Iterator[Journal]:
    """Open or create the journal of the job that the folder was accepted for."""
    path = folder / JOURNAL_FILE
    with writing(path):
        path.touch()
        with path.open("r+b") as file:
            yield Journal(path, file)
