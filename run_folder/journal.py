"""Results of the pieces of a job that are done, in its unfinished folder until all are (:mod:`run_folder.job`).

A text file: the lines of each piece and an empty one. What stands behind the last empty line was cut short by a kill,
and is computed again.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from common.publishing import writing

JOURNAL_FILE = "done.tsv"


class Journal:
    """An open journal.

    Attributes:
        done: pieces whose lines it has.
    """

    def __init__(self, path: Path, file: TextIO, done: int) -> None:
        self.path, self.done, self._file = path, done, file

    def add(self, lines: Iterable[str]) -> None:
        """Append the lines of the next piece, none of them empty."""
        with writing(self.path):
            self._file.write("".join(f"{line}\n" for line in lines) + "\n")
            self._file.flush()
        self.done += 1

    def lines(self) -> Iterator[str]:
        """All lines of all pieces, in order, with their line feeds."""
        with self.path.open(encoding="utf-8") as file:
            yield from (line for line in file if line != "\n")


@contextmanager
def journal(folder: Path) -> Iterator[Journal]:
    """Open or begin the journal of the job that the folder was accepted for."""
    path = folder / JOURNAL_FILE
    with writing(path):
        path.touch()
        with path.open("r+", encoding="utf-8") as file:
            done, end = 0, 0
            while line := file.readline():
                if line == "\n":
                    done, end = done + 1, file.tell()
            file.seek(end)
            file.truncate()
            yield Journal(path, file, done)
