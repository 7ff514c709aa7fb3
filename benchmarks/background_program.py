"""A program that runs while something else is done: started, watched, ended with all its processes."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from benchmarks.launching import END_TIMEOUT_S, LAST_WORDS, start_program
from benchmarks.process_family import ProcessFamily


class BackgroundProgram:
    """A program and all processes that it starts.

    Args:
        command: what to run, in the repository's root.
        said: file that gets what it says.
        variables: of its environment, besides those of this process.
        takes_input: whether it is written to, by :meth:`send`.
    """

    def __init__(
        self, command: list[str], said: Path, variables: Mapping[str, str] | None = None, takes_input: bool = False
    ) -> None:
        self.family, self._said = ProcessFamily(), said
        self._asked_to_end = False
        environment = {**self.family.variables, **(variables or {})}
        with said.open("w", encoding="utf-8") as output:
            self.process = start_program(command, output, environment, subprocess.PIPE if takes_input else None)

    def require_alive(self) -> None:
        """Raise RuntimeError with its last words if it has ended."""
        if self.process.poll() is not None:
            words = self._said.read_text(encoding="utf-8", errors="replace")[-LAST_WORDS:]
            raise RuntimeError(f"a program ended with code {self.process.returncode} while it was measured: {words}")

    def send(self, line: str) -> None:
        """Write a line to its stdin."""
        assert self.process.stdin is not None, "made without takes_input"
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def ask_to_end(self) -> None:
        """Tell it, continued if it was stopped, to end. May be called again."""
        if not self._asked_to_end:
            self._asked_to_end = True
            self.family.ask_to_end(self.process)

    def end(self) -> None:
        """Wait for its end and leave no process of it."""
        self.ask_to_end()
        self.family.end(self.process, END_TIMEOUT_S)
        if self.process.stdin is not None:
            self.process.stdin.close()
