"""Metrics to Weights & Biases, which can neither stop nor slow a run.

In: records of metrics.jsonl, samples and alerts, from the run's first on. Out: a W&B run, on the server or in an
offline file. What the values are called is :mod:`monitoring.sinks.wandb_names`'.

``write`` appends to a spool file and returns. A daemon thread feeds the spool to a process in which all of wandb runs
(:mod:`monitoring.sinks.wandb_process`). Where that process fails, or is silent for longer than a timeout allows, it is
killed with everything that it started, and another one in offline mode gets the spool from its beginning: the offline
file then holds the whole run, and one warning says where it is. Since W&B's ``sync`` of an offline file replaces what
the server has of that run, each (re)start of a run writes its whole history into a new offline file: syncing the newest
is right. On the server a resumed run continues; rows that the server has are left out.

wandb's own sampler of the system is off: it would sample the machine of the driver, which on a cluster none of the
workers is on, and elsewhere the same figures twice under other names, by one more process.

What it can cost: ``write`` never waits; only ``close`` does, for ``finish_timeout_s`` and, where the offline file must
still be written, :data:`FALLBACK_S` more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from monitoring.sinks.wandb_names import WandbRows
from run_folder.metrics_log import Record, encode_record
from train_config.schema import WandbSection

logger = logging.getLogger(__name__)

FALLBACK_S = 4.0
"""Seconds that close() may take beyond finish_timeout_s to write the offline file of a run that W&B failed."""
STANDBY_AFTER_S = 2.0
"""Seconds of waiting in close() after which the process for the offline file is started, should it be needed."""
START_LIMIT_S = 60.0
"""Seconds in which Python must have imported wandb, or opened an offline file, on a loaded machine."""
SHUTDOWN_S = 2.0
"""Seconds that wandb's service may take to close its file once the run is finished."""
FLUSH_S = 1.0
"""Seconds between wandb's writes to its file: what an untimely end can lose of it (metrics.jsonl has it all)."""
KILL_LIMIT_S = 0.3
"""Seconds that killed processes may take to be gone."""
MARK = "ESMERAY_WANDB_PROCESS"
"""Environment variable by which all processes that one wandb process started are found."""
SPOOL_LIMIT_BYTES = 2 << 30
SAMPLES_SHARE = 0.75
"""Of the spool: beyond it samples, which fill it in a week or so, are left out: the loop's records keep room."""
POLL_S = 0.1
CHUNK_BYTES = 1 << 16


def new_run_id() -> str:
    """An id for W&B, as W&B makes them. Made once for a run and kept in its folder, so that resuming continues it."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


class WandbSink:
    """One run's W&B.

    Args:
        section: mode, project, entity, group and timeouts.
        run_id: of :func:`new_run_id`; the same when the run is resumed.
        run_name: shown by W&B.
        run_folder: W&B's files go to its ``wandb`` folder.
        config: the resolved config, JSON values.
        warn: what to call with the one warning that W&B may cause.
        rows: makes rows of records; default: for a W&B run that holds the figures of all workers.
    """

    live = False

    def __init__(
        self,
        section: WandbSection,
        run_id: str,
        run_name: str,
        run_folder: Path | str,
        config: Mapping[str, Any],
        warn: Callable[[str], None] = logger.warning,
        rows: WandbRows | None = None,
    ) -> None:
        self._section = section
        self._rows = rows or WandbRows(alerts_from_s=time.time(), name_nodes=True)
        self._run = (run_id, run_name)
        self._folder = Path(run_folder).absolute()
        self._config = dict(config)
        self._warn = warn
        self._spool = self._new_spool()
        self._closed_at: float | None = None
        self._process: _WandbProcess | None = None
        self._standby: _WandbProcess | None = None
        self._thread = threading.Thread(target=self._work, name="wandb-sink", daemon=True)
        self.offline_folder: Path | None = None
        """Folder for ``wandb sync``, once the run is recorded offline."""
        if self._spool is not None:
            self._thread.start()

    def write(self, record: Record) -> None:
        """Take one record; returns at once."""
        if self._spool is not None and self._closed_at is None:
            room = SAMPLES_SHARE if record["kind"] == "sample" else 1.0
            self._spool.append(encode_record(self._rows.row(record).as_order()), room)

    def close(self) -> None:
        """End the W&B run. Waits as the module says; leaves no process behind. May be called again."""
        if self._spool is None or self._closed_at is not None:
            return
        self._closed_at = time.monotonic()
        self._spool.ended.set()
        self._thread.join(self._section.finish_timeout_s + FALLBACK_S + 2 * POLL_S)
        for process in (self._process, self._standby):
            if process is not None:
                process.kill()
        if self._thread.is_alive():
            self._warn("W&B did not end in time and was cut off; metrics.jsonl holds all values")
        else:
            self._spool.close()

    def _new_spool(self) -> _Spool | None:
        """None where there is nothing to do, or nowhere to do it."""
        if self._section.mode == "disabled":
            return None
        try:
            return _Spool(SPOOL_LIMIT_BYTES)
        except OSError as error:
            self._warn(f"W&B is left out of this run (no temporary file: {error}); metrics.jsonl holds all values")
            return None

    def _work(self) -> None:
        """The thread: online if asked, offline where that fails, one warning at most."""
        problem = self._guarded_session("online") if self._section.mode == "online" else None
        if problem is None and self._section.mode == "online":
            return
        failure = self._guarded_session("offline", problem)
        if failure is not None:
            reasons = "; ".join(reason for reason in (problem, failure) if reason)
            self._warn(f"W&B is left out of this run ({reasons}); metrics.jsonl holds all values")

    def _guarded_session(self, mode: str, problem: str | None = None) -> str | None:
        try:
            self._session(mode, problem)
        except (_WandbError, OSError) as error:
            return str(error)
        finally:
            if self._process is not None:
                self._process.kill()
        return None

    def _session(self, mode: str, problem: str | None) -> None:
        """Record the run in ``mode`` from its first step to its end. Raises _WandbError where W&B fails."""
        self._process, self._standby = self._standby or self._new_process(), None
        process = self._process
        self._expect(process, "imported", mode, START_LIMIT_S, "wandb did not start")
        process.send(self._order(mode), lambda: self._is_over(mode))
        init_limit_s = self._section.init_timeout_s if mode == "online" else START_LIMIT_S
        ready = self._expect(process, "ready", mode, init_limit_s, "no answer from the server")
        folder = Path(ready["folder"])
        if mode == "offline":
            self.offline_folder = folder
        if problem is not None:
            self._warn(f"W&B: {problem}; this run is recorded offline: 'wandb sync {folder}' uploads it")
        self._feed(process, mode)
        process.end_input()
        finished = self._expect(process, "finished", mode, None, "no answer from the server at the end")
        process.wait(min(SHUTDOWN_S, self._section.finish_timeout_s))
        if mode == "online" and finished["problem"] is not None:
            reason = finished["problem"].split(". ")[0].rstrip(".")
            upload = f"wandb sync --include-online {folder}"  # without the option, sync passes over what began online
            self._warn(f"W&B did not take all values ({reason}); they are on disk: '{upload}' uploads them")

    def _feed(self, process: _WandbProcess, mode: str) -> None:
        spool, position = self._spool, 0
        assert spool is not None  # else there is no thread
        while True:
            ended = spool.ended.is_set()  # looked at before reading, so that the last lines are not missed
            lines, position = spool.read(position)
            if lines:
                process.send(lines, lambda: self._is_over(mode))
            elif ended:
                break
            else:
                process.check()
                spool.ended.wait(POLL_S)
        if spool.dropped:
            self._warn(f"W&B lacks {spool.dropped} records (spool full); the run's folder holds all values")

    def _expect(
        self, process: _WandbProcess, state: str, mode: str, limit_s: float | None, otherwise: str
    ) -> dict[str, Any]:
        """The process's next reply, which must be ``state``, within ``limit_s`` and what close() allows."""
        started = time.monotonic()
        while (reply := process.reply(POLL_S)) is None:
            waited_s = time.monotonic() - started
            if (limit_s is not None and waited_s > limit_s) or self._is_over(mode):
                raise _WandbError(f"{otherwise} within {waited_s:.0f} s")
            closing_for_s = 0.0 if self._closed_at is None else time.monotonic() - self._closed_at
            if mode == "online" and closing_for_s > STANDBY_AFTER_S and self._standby is None:
                self._standby = self._new_process()
        if reply["state"] != state:
            raise _WandbError(reply.get("reason", f"unexpected reply {reply['state']}"))
        return reply

    def _is_over(self, mode: str) -> bool:
        """Whether close() has waited as long as it may for ``mode``."""
        if self._closed_at is None:
            return False
        allowed_s = self._section.finish_timeout_s + (FALLBACK_S if mode == "offline" else 0.0)
        return time.monotonic() - self._closed_at > allowed_s

    def _new_process(self) -> _WandbProcess:
        return _WandbProcess(self._folder / "wandb", orphan_grace_s=self._section.finish_timeout_s)

    def _order(self, mode: str) -> bytes:
        section, (run_id, run_name) = self._section, self._run
        settings = {
            "mode": mode,
            "root_dir": str(self._folder),
            "run_id": run_id,
            "run_name": run_name,
            "project": section.project,
            "entity": section.entity,
            "run_group": section.group,
            "resume": "allow",
            "console": "off",
            "save_code": False,
            "disable_code": True,
            "disable_git": True,
            "disable_job_creation": True,
            "silent": True,
            "x_disable_stats": True,
            "init_timeout": section.init_timeout_s,
            # A little before this side's patience ends, so that wandb closes its file in good order by itself.
            "finish_timeout": max(section.finish_timeout_s - 1.0, section.finish_timeout_s / 2),
            "x_transaction_log_flush_interval": FLUSH_S,
        }
        return encode_record({"settings": settings, "config": self._config})


class _WandbError(Exception):
    """W&B failed, hung or died; the message is for the warning."""


class _Spool:
    """An unbounded queue that costs no memory: lines appended by one thread, read (again, if need be) by another."""

    def __init__(self, limit_bytes: int) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives as long as the sink
        self._limit_bytes = limit_bytes
        self._size = 0
        self.dropped = 0
        self.ended = threading.Event()

    def append(self, line: bytes, share: float = 1.0) -> None:
        """Add a line, or count it as dropped where this share of the spool is taken."""
        if self._size + len(line) > share * self._limit_bytes:
            self.dropped += 1
            return
        try:
            os.pwrite(self._file.fileno(), line, self._size)
        except OSError:  # disk full: the record is counted and reported, metrics.jsonl has it
            self.dropped += 1
            return
        self._size += len(line)

    def read(self, position: int) -> tuple[bytes, int]:
        """Whole lines from ``position`` on (b"" if there are none yet) and where the next ones begin."""
        data = os.pread(self._file.fileno(), min(CHUNK_BYTES, self._size - position), position)
        lines = data[: data.rfind(b"\n") + 1]
        return lines, position + len(lines)

    def close(self) -> None:
        self._file.close()


class _WandbProcess:
    """A running ``wandb_process``. All waiting is by polls, so that a deadline can always be kept."""

    def __init__(self, log_folder: Path, orphan_grace_s: float) -> None:
        log_folder.mkdir(parents=True, exist_ok=True)
        self._mark = secrets.token_hex(16)
        script = Path(__file__).with_name("wandb_process.py")
        with (log_folder / "process.log").open("ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", str(script), str(orphan_grace_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment() | {MARK: self._mark},
                start_new_session=True,  # Ctrl-C in the terminal is for the driver, which then ends this in order
            )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._stdin, self._stdout = self._popen.stdin, self._popen.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._received = b""

    def send(self, data: bytes, is_over: Callable[[], bool]) -> None:
        """Write all of ``data`` to the process, unless it dies or ``is_over`` first (_WandbError)."""
        remaining = memoryview(data)
        while remaining:
            if not select.select([], [self._stdin], [], POLL_S)[1]:
                self.check()
                if is_over():
                    raise _WandbError("wandb takes no more values")
                continue
            try:
                remaining = remaining[os.write(self._stdin.fileno(), remaining) :]
            except BrokenPipeError:
                self.check()
                raise _WandbError("wandb's process ended") from None

    def end_input(self) -> None:
        """Tell the process that the run is over."""
        self._stdin.close()

    def check(self) -> None:
        """Raise _WandbError with the process's own words if it has failed."""
        reply = self.reply(0.0)
        if reply is not None:
            raise _WandbError(reply.get("reason", f"unexpected reply {reply['state']}"))

    def reply(self, timeout_s: float) -> dict[str, Any] | None:
        """The process's next reply, or None if there is none within ``timeout_s``."""
        while b"\n" not in self._received:
            if not select.select([self._stdout], [], [], timeout_s)[0]:
                return None
            data = os.read(self._stdout.fileno(), CHUNK_BYTES)
            if not data:
                raise _WandbError("wandb's process ended")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def wait(self, timeout_s: float) -> None:
        """Give the process ``timeout_s`` to end by itself."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.debug("wandb's process %d did not end by itself", self._popen.pid)

    def kill(self) -> None:
        """End the process and whatever it started. May be called again."""
        self._popen.kill()
        self._popen.wait()
        deadline = time.monotonic() + KILL_LIMIT_S
        while (processes := self._marked()) and time.monotonic() < deadline:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(POLL_S / 10)
        for pipe in (self._stdin, self._stdout):
            pipe.close()

    def _marked(self) -> list[psutil.Process]:
        """What the process started and is alive. wandb-core's helpers are nobody's children once it is dead."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark:
                    found.append(process)
            except (psutil.Error, OSError):  # ended meanwhile, or another user's
                continue
        return found


def _environment() -> dict[str, str]:
    """This process's, without what ties to another wandb run, and without wandb's own error reports to its makers."""
    tied = ("WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_MODE", "WANDB_DIR")
    kept = {name: value for name, value in os.environ.items() if name not in tied}
    return {**kept, "WANDB_ERROR_REPORTING": "false"}
