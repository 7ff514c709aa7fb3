"""Results of the parts of a job that are done, kept until all are, so that a killed job resumes.

They lie in the folder ``OUTPUT.partial``. The journal in it is a text file: a first line with what the results depend
on, then the lines of each part and an empty one. What stands behind the last empty line was cut short by a kill, and is
computed again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from common.errors import ConfigError
from common.publishing import exclusive, writing


class Journal:
    """An open journal.

    Attributes:
        done: parts whose lines it has.
    """

    def __init__(self, path: Path, file: TextIO, done: int) -> None:
        self.path, self.done, self._file = path, done, file

    def add(self, lines: Iterable[str]) -> None:
        """Append the lines of the next part, none of them empty."""
        with writing(self.path):
            self._file.write("".join(f"{line}\n" for line in lines) + "\n")
            self._file.flush()
        self.done += 1

    def lines(self) -> Iterator[str]:
        """All lines of all parts, in order, with their line feeds."""
        with self.path.open(encoding="utf-8") as file:
            next(file)
            yield from (line for line in file if line != "\n")


@contextmanager
def unfinished(output: Path) -> Iterator[Path]:
    """The folder of the work on an output, removed when the block ends, or when it raises with nothing kept."""
    folder = output.with_name(f"{output.name}.partial")
    with exclusive(folder), writing(folder):
        folder.mkdir(exist_ok=True)
        try:
            yield folder
            shutil.rmtree(folder)
        except BaseException:
            with suppress(OSError):  # of a folder that holds work
                folder.rmdir()
            raise


@contextmanager
def journal(path: Path, job: dict[str, Any]) -> Iterator[Journal]:
    """Open or begin the journal of a job. Raises ConfigError where it is of another job."""
    first = json.dumps(job, sort_keys=True) + "\n"
    with writing(path):
        path.touch()
        with path.open("r+", encoding="utf-8") as file:
            begun = file.readline()
            if begun.endswith("\n") and begun != first:
                before = json.loads(begun)
                differing = ", ".join(sorted(key for key in {**before, **job} if before.get(key) != job.get(key)))
                raise ConfigError(
                    f"{path.parent}: holds the unfinished work of another command (other {differing}); remove it"
                )
            done, kept = 0, file.tell() if begun == first else 0
            while line := file.readline():
                if line == "\n":
                    done, kept = done + 1, file.tell()
            file.seek(kept)
            file.truncate()
            if not kept:
                file.write(first)
            yield Journal(path, file, done)
