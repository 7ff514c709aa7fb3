"""One line of the report: a part, a verdict, what was seen and what to do; and how it is come by without noise."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, TextIO

from common.errors import EsmerayError

Verdict = Literal["ok", "missing", "mismatch", "failed"]
"""missing: not there; mismatch: there, but not fit for what else is; failed: only of training steps."""

NOTE_AFTER_S = 2.0
"""Seconds after which a part says that it is being waited for."""

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements.txt"
INSTALL = "pip install -r requirements.lock"
_PART_WIDTH = 14
_VERDICT_WIDTH = max(map(len, ("ok", "missing", "mismatch", "failed")))


@dataclass(frozen=True)
class Finding:
    """What there is to say of one part.

    Attributes:
        part: its name.
        verdict: of it.
        seen: what was found.
        remedy: what to do; empty where there is nothing.
    """

    part: str
    verdict: Verdict
    seen: str
    remedy: str = ""

    def line(self) -> str:
        """One line, aligned with those of the other parts."""
        text = self.seen + (f"; {self.remedy}" if self.remedy else "")
        return f"{self.part:<{_PART_WIDTH}} {self.verdict:<{_VERDICT_WIDTH}} {' '.join(text.split())}"


def guarded(part: str, look: Callable[[], Finding]) -> Finding:
    """What ``look`` finds; a library that can't be imported, or breaks when it is asked, is a finding as well."""
    try:
        with note_if_slow(f"looking at {part} ..."):
            return look()
    except ModuleNotFoundError as error:
        return Finding(part, "missing", f"{error.name} is not installed", INSTALL)
    except Exception as error:  # noqa: BLE001 - whatever breaks here is what this tool is there to tell
        return Finding(
            part, "mismatch", f"it breaks when it is asked ({first_line(error)})", f"install anew: {INSTALL}"
        )


def with_pin(finding: Finding, package: str) -> Finding:
    """The finding, or that the package is of another version than Esmeray is tested with."""
    installed, pin = _installed(package), pinned_version(package)
    if finding.verdict != "ok" or pin is None or installed is None or installed.partition("+")[0] == pin:
        return finding
    return replace(finding, verdict="mismatch", remedy=f"Esmeray is tested with {pin}: {INSTALL}")


def pinned_version(package: str) -> str | None:
    """The version that requirements.txt asks for; None if it is not there."""
    try:
        text = REQUIREMENTS.read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(rf"^{re.escape(package)}(?:\[[^]]*\])?==([^\s;]+)", text, re.MULTILINE)
    return found[1] if found else None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type where it has none, or where the message alone says little."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, EsmerayError):
        return lines[0] if lines else type(error).__name__
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing that libraries, or the compilers that they start, print reaches the terminal."""
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        saved = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
        try:
            for descriptor in saved:
                os.dup2(nowhere.fileno(), descriptor)
            yield
        finally:
            for descriptor, copy in saved.items():
                os.dup2(copy, descriptor)
                os.close(copy)


@contextlib.contextmanager
def note_if_slow(text: str) -> Iterator[None]:
    """Say on standard error what is being waited for, once it takes longer than :data:`NOTE_AFTER_S`."""
    stream = _lasting_stderr()
    timer = threading.Timer(NOTE_AFTER_S, lambda: print(text, file=stream, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if stream is not sys.stderr:
            stream.close()


def _lasting_stderr() -> TextIO:
    """Standard error, to which :func:`quiet` does nothing."""
    try:
        return os.fdopen(os.dup(sys.stderr.fileno()), "w")
    except (OSError, ValueError):  # no file behind it, as in a notebook
        return sys.stderr
