"""Failures of a worker: what they are called, and which of them trying again would only repeat."""

from __future__ import annotations

import re

from common.errors import DivergenceError, EsmerayError, ResourceError
from common.publishing import is_disk_full
from run_folder.paths import Outcome, RunFolder, no_space
from training.checkpoints.checkpoint import Position
from training.engine.memory_guard import REMEDY
from training.engine.memory_meter import is_out_of_memory

_LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|timed? ?out|broken pipe|store", re.IGNORECASE)


def repeatable(error: Exception) -> int | None:
    """The exit code of a failure that trying again would repeat; None for what a machine did.

    A lost peer shows as a RuntimeError of the collective or an error of Ray's, a failing disk or network as OSError:
    those are worth another try. So is an EsmerayError that says so. Everything else would only happen again.
    """
    if isinstance(error, EsmerayError):
        return None if error.retryable else error.exit_code
    if is_out_of_memory(error) or is_disk_full(error):
        return ResourceError.exit_code
    if isinstance(error, OSError):
        return EsmerayError.exit_code if isinstance(error, FileNotFoundError | PermissionError) else None
    lost_peer = isinstance(error, RuntimeError) and _LOST_PEER.search(str(error))
    from_launcher = type(error).__module__.partition(".")[0] == "ray"
    return None if lost_peer or from_launcher else EsmerayError.exit_code


def described(error: Exception) -> str:
    """In a line, for a person."""
    if isinstance(error, EsmerayError):
        return str(error)
    if is_out_of_memory(error):
        return f"out of memory: {REMEDY}"
    if is_disk_full(error):
        return no_space(getattr(error, "filename", None) or "a file of the run")
    return f"{type(error).__name__}: {error}"


def failed(run: RunFolder, position: Position, error: EsmerayError | None) -> Outcome:
    """The outcome where a worker can't continue, written by the one whose ``error`` it is."""
    message = str(error) if error else "another worker failed"
    outcome = Outcome("failed", position.step, message, error.exit_code if error else 1)
    if error is not None:
        run.write_outcome(outcome)
    return outcome


def diverged(run: RunFolder, position: Position) -> Outcome:
    """The outcome after too many steps in a row that were not finite."""
    message = (
        f"loss or gradient was not finite in {position.nonfinite_in_a_row} steps in a row, "
        f"the last one step {position.step}; "
        f"the record ids are in {run.nonfinite}: lower training.learning_rate, or look at these records"
    )
    return Outcome("diverged", position.step, message, DivergenceError.exit_code)
