"""Weights & Biases for one run, in a separate process that follows the run's folder.

The driver (:mod:`esmeray.monitoring.sinks.wandb_run`) starts it. All wandb calls that may block happen here; the run is
not affected if this process hangs or is killed. To upload a run that has ended, or values that W&B did not accept,
start it again. The run on the server continues, and rows that exist there are left out:

    python -m esmeray.monitoring.sinks.wandb_follower RUN_FOLDER --mode online

Settings come from the run's config.yaml. Standard output has one line on what went wrong. Records of the loop have the
step as their axis. Samples and alerts have the time: they continue while no step runs, and a resumed run repeats steps
but not times. W&B's timestamp is set to the record's time, since an upload may come later. W&B groups charts by
section: the part of a name before its first slash.
"""

import argparse
import contextlib
import io
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import psutil
import yaml

from esmeray.common.errors import first_line
from esmeray.common.remote import local_path
from esmeray.monitoring.sampling.metric_names import METRICS, RUN_METRICS
from esmeray.monitoring.section import WandbSection
from esmeray.run_folder.metrics_log import Record, RunTail, read_metrics
from esmeray.run_folder.paths import RunFolder

POLL_S = 0.5
OFFLINE_LIMIT_S = 60.0
"""Seconds allowed for writing the rest of an offline file, on a loaded machine."""
ELAPSED = "elapsed_s"
"""Seconds since the run's first record: the axis of samples and alerts."""
POSITION = "position"
"""Namespace of each stream's position on the server."""
CURVES = "train/curves"
"""The run's curves.png."""
SECTIONS = {
    metric.last_part: metric.name.partition("/")[0]
    for metric in METRICS
    if metric.name.startswith(("throughput/", "data/"))
}
"""Sections of speed values of a step; all other values are in the section train."""


def main(argv: list[str]) -> NoReturn:
    """Follow or replay one run, then exit without wandb's atexit hook, which waits for the server."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--mode", choices=["offline", "online"], help="default: wandb.mode of the run's config")
    parser.add_argument("--worker", type=int, help="upload only this worker's records, as a separate W&B run")
    parser.add_argument(
        "--follow",
        action="store_true",
        help="follow the run until stdin closes; default: upload the existing records and exit",
    )
    arguments = parser.parse_args(argv)
    replies = os.dup(1)  # the pipe to the driver, not inherited by wandb's service; descriptor 1 goes to the log
    os.dup2(2, 1)
    # For wandb's temporary folders (0.31), which its atexit hook would remove, and for folders that it would create in
    # a home folder, which a container may lack.
    os.environ["TMPDIR"] = os.environ["WANDB_DATA_DIR"] = tempfile.tempdir = tempfile.mkdtemp()
    try:
        problem = _Follower(arguments, replies).run()
    except Exception as error:  # noqa: BLE001 - whatever wandb raises is reported in a line
        problem = f"{type(error).__name__}: {first_line(error)}"
    _leave(replies, problem)


class _Follower:
    def __init__(self, arguments: argparse.Namespace, replies: int) -> None:
        path = arguments.run_folder.absolute()
        self._run = RunFolder(path.parent, path.name)
        self._config = yaml.safe_load(self._run.config.read_text(encoding="utf-8"))
        self._section = WandbSection(**self._config["wandb"])
        self._mode = arguments.mode or self._section.mode
        self._worker: int | None = arguments.worker
        self._follow, self._replies = arguments.follow, replies
        self._hint = f" (wandb.finish_timeout_s is {self._section.finish_timeout_s:g}" + (
            ", and wandb.log_model uploads the model)" if self._section.log_model else ")"
        )
        self._ended, self._imported = threading.Event(), threading.Event()

    def run(self) -> str | None:
        """Log the run to its end; return wandb's first warning, if any."""
        if self._follow:
            threading.Thread(target=self._end_in_time, daemon=True).start()
        else:
            self._ended.set()
        sys.stderr = complaints = _Complaints(sys.stderr.buffer, errors="backslashreplace", line_buffering=True)
        import wandb  # takes seconds

        self._wandb = wandb
        self._imported.set()  # the timeout starts here: it excludes Python's import time
        run: Any = self._wandb.init(settings=self._wandb.Settings(**self._settings()), config=self._config)
        # After init, which would replace them: tags and notes edited on the server survive a resume.
        run.tags = tuple(dict.fromkeys([*run.tags, *self._section.tags]))
        run.notes = (run.resumed and run.notes) or self._section.notes or run.notes
        for axis in ("step", ELAPSED):
            run.define_metric(axis, hidden=True)
        try:
            self._log(run)
        finally:
            # W&B marks a run as failed by its exit code. A killed run has no outcome.
            run.finish(exit_code=getattr(self._run.read_outcome(), "exit_code", 1))
            problem = complaints.first + self._hint if complaints.first and self._mode == "online" else None
            self._wandb.teardown()  # wandb-core writes the rest of its file and ends
        return problem

    def _log(self, run: Any) -> None:
        """Log the run's records until its end, then its model if configured."""
        known = dict(run.summary) if run.resumed else {}  # read once, before this process adds to it
        # Send alerts since the driver's start only: earlier ones were sent, and a replay sends none.
        rows = WandbRows(psutil.Process().create_time() if self._follow else math.inf, name_nodes=self._worker is None)
        seen: set[tuple[object, ...]] = set()
        defined: set[str] = set()
        for record in self._records():
            row = rows.row(record)
            repeats = (record["kind"], record["step"], record.get("event"))  # from a resumed run
            if row.position == "step" and repeats in seen:
                continue
            seen.add(repeats)
            # With one W&B run per worker, records without a worker (loop, alerts) go to worker 0's.
            if self._worker not in (None, record.get("worker", 0)) or _is_known(row, known):
                continue
            axis = "step" if "step" in row.values else ELAPSED
            new_names = {name for name in row.values if "/" in name} - defined
            # One definition per name, not a pattern per section: a section has values of steps and of samples.
            for name in new_names:
                run.define_metric(name, step_metric=axis, hidden=name.startswith(POSITION))
            defined |= new_names
            if CURVES in row.values:
                row.values[CURVES] = self._wandb.Image(str(self._run.curves))
                known[row.position] = row.values[row.position]  # the same picture is not logged again
            run.log(row.values)
            if row.alert is not None:
                run.alert(**row.alert, wait_duration=300)  # seconds in which W&B drops alerts with the same title
        outcome = self._run.read_outcome()
        if self._section.log_model and not self._worker and outcome is not None and outcome.status == "finished":
            self._log_model(run, outcome.step)

    def _log_model(self, run: Any, step: int) -> None:
        """Log the export as an artifact, with the last validation up to its step."""
        records = read_metrics(self._run.metrics)
        best = [record["step"] for record in records if record.get("event") == "exports_best"]
        step = best[-1] if best else step
        validated = [wandb_values(r) for r in records if r["kind"] == "validation" and r["step"] <= step]
        metadata = {**(validated[-1] if validated else {}), "step": step}
        artifact = self._wandb.Artifact(self._run.path.name, "model", metadata=metadata)
        # If worker 0 was on another machine, the folder is missing here, and the run is at a URI.
        uri = f"{self._config['run']['storage_path']}/{self._run.path.name}/{self._run.export.name}"
        export = self._run.export if self._run.export.is_dir() else local_path(uri)
        # Immutable: read in place, since there may be no space for a copy of the model.
        artifact.add_dir(str(export), policy="immutable", skip_cache=True)
        run.log_artifact(artifact, aliases=["latest", "best"] if best else ["latest"])

    def _records(self) -> Iterator[Record]:
        """Yield the run's records, and after each poll a record of kind "curves" with the time of the picture."""
        tail = RunTail(self._run)
        while True:
            ended = self._ended.is_set()  # before reading, so that the last records are not missed
            yield from tail.poll()
            if self._run.curves.exists():
                yield {"kind": "curves", "step": 0, "time": self._run.curves.stat().st_mtime}
            if ended:
                return
            self._ended.wait(POLL_S)  # wakes up at the end, unlike sleep

    def _end_in_time(self) -> None:
        """Wait for the driver's end, then exit when the timeout is over at the latest."""
        while os.read(0, 1):  # the driver's end of the pipe also closes if it is killed
            pass
        self._ended.set()
        self._imported.wait(OFFLINE_LIMIT_S)
        # Online has three more seconds, in which wandb's service closes its file.
        limit_s = self._section.finish_timeout_s + 3.0 if self._mode == "online" else OFFLINE_LIMIT_S
        time.sleep(limit_s)
        _leave(self._replies, f"no answer within {limit_s:.0f} s after the end of the run{self._hint}")

    def _settings(self) -> dict[str, Any]:
        section = self._section
        run_id, name = self._run.wandb_run_id.read_text().strip(), self._run.path.name
        group = section.group if self._worker is None else section.group or name
        if self._worker:
            run_id, name = f"{run_id}-{self._worker}", f"{name}-worker-{self._worker}"
        return {
            "mode": self._mode,
            "root_dir": str(self._run.path),
            "run_id": run_id,
            "run_name": name,
            "project": section.project,
            "entity": section.entity,
            "run_group": group,
            "run_job_type": section.job_type,
            "resume": "allow",
            "console": "off",  # otherwise wandb captures this process's output, which is empty
            "save_code": False,
            # Statistics would describe the driver's machine.
            **dict.fromkeys(("disable_code", "disable_git", "disable_job_creation", "silent", "x_disable_stats"), True),
            "init_timeout": section.init_timeout_s,
            # Slightly less than the driver waits, so that wandb itself reports what it could not upload. A replay has
            # no limit.
            "finish_timeout": max(section.finish_timeout_s - 1.0, section.finish_timeout_s / 2)
            if self._follow
            else 0.0,
            # Seconds between flushes: the maximum lost if the process is killed.
            "x_transaction_log_flush_interval": 1.0,
        }


class _Complaints(io.TextIOWrapper):
    """Standard error that stores the first warning: wandb reports failed uploads in no other way."""

    first: str | None = None

    def write(self, text: str) -> int:
        complaint = re.search(r"(?:WARNING|ERROR) +(.+)", text)
        if complaint and self.first is None:
            self.first = complaint[1].strip()
        return super().write(text)


def _leave(replies: int, problem: str | None) -> NoReturn:
    if problem is not None:
        with contextlib.suppress(BrokenPipeError):  # the driver was killed
            os.write(replies, problem.encode())
    for process in psutil.Process().children(recursive=True):  # wandb-core, if it still waits for the server
        process.kill()
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
    os._exit(problem is not None)  # skips atexit hooks and wandb's threads


class Row(NamedTuple):
    """One row of W&B's history, with an alert to send.

    ``position`` names a value that grows with each row of the stream; it identifies rows that the server already has.
    """

    position: str
    values: dict[str, Any]
    alert: dict[str, str] | None = None


def _is_known(row: Row, summary: Mapping[str, Any]) -> bool:
    """Test whether the server has this row; a validation of the last known step is repeated, since it may be new."""
    position, last = row.values[row.position], summary.get(row.position, -math.inf)
    return position < last or (position == last and (row.position != "step" or "train/loss" in row.values))


@dataclass
class WandbRows:
    """Converter from records to rows.

    Attributes:
        alerts_from_s: Unix seconds; earlier alerts are logged but not sent.
        name_nodes: prefix values with the node's name, except for worker 0's node.
    """

    alerts_from_s: float
    name_nodes: bool
    _began_s: float | None = None
    _step: int = 0

    def row(self, record: Record) -> Row:
        """Return the row of a record. The first record's time is the zero of the time axis."""
        time_s = float(record.get("time") or 0.0)
        if self._began_s is None:
            self._began_s = time_s
        self._step = max(self._step, record["step"])  # for the curves: the last step that they show
        values: dict[str, Any] = {"_timestamp": time_s, ELAPSED: time_s - self._began_s}
        # Each stream has its own position: samples of one worker may lag behind another's.
        if record["kind"] == "sample":
            position = f"{POSITION}/worker/{record['worker']}"
            # Machines share GPU numbers: gpu/0/util is worker 0's machine, gpu/HOST/0/util any other.
            host = f"{record['host']}/" if self.name_nodes and record["worker"] != 0 else ""
            values |= {
                re.sub(r"^(gpu|host)/(?!worker/)", rf"\1/{host}", name): value
                for name, value in record["metrics"].items()
                if value is not None and name not in RUN_METRICS.values()  # those are in the loop's records
            }
            return Row(position, {**values, position: time_s})
        if record["kind"] == "alert":
            position, name, raised = f"{POSITION}/alert", record["name"], record["state"] == "raised"
            # With the subject, since W&B drops repeated titles, and another GPU's alert is new. W&B's limit is 63
            # characters.
            alert = {
                "title": f"{name.replace('_', ' ')}: {record.get('subject')}"[:63],
                "text": record["message"],
                "level": "ERROR" if name == "nonfinite_loss" else "WARN",
            }
            sent = alert if raised and time_s >= self.alerts_from_s else None
            return Row(position, {**values, position: time_s, f"alert/{name}": int(raised)}, sent)
        if record["kind"] == "curves":
            values |= {f"{POSITION}/curves": time_s, "step": self._step, CURVES: None}
            return Row(f"{POSITION}/curves", values)
        return Row("step", {"_timestamp": time_s, **wandb_values(record)})


def wandb_values(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return W&B's values of a loop record: ``step``, ``SECTION/name`` of each number, ``event/name`` = 1."""
    step, kind = int(record["step"]), record["kind"]
    if kind == "event":
        return {"step": step, f"event/{record['event']}": 1}
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
    charts = {f"{SECTIONS.get(name, kind)}/{name}": numbers[name] for name in numbers if name not in ("step", "time")}
    return {"step": step, **charts}


if __name__ == "__main__":
    main(sys.argv[1:])
