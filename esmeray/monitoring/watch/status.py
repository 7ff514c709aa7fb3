"""Short status of a run, read from its files only: also while it is written, or on another machine."""

import time
from collections.abc import Iterator
from pathlib import Path

from esmeray.common.errors import ConfigError, did_you_mean
from esmeray.common.text import amount, duration
from esmeray.monitoring.advice import Facts, limiting_factor
from esmeray.monitoring.watch.progress import Pace, describe_alert, describe_validation, loss_text
from esmeray.run_folder.checkpoints import saved_steps
from esmeray.run_folder.job import lock_state
from esmeray.run_folder.metrics_log import MetricLabels, Record, RecordTail
from esmeray.run_folder.paths import Outcome, RunFolder
from esmeray.train_config.loading import read_file


class RunStatus:
    """Status of a run; :meth:`update` reads new records. Raises ConfigError if the folder is not a run's.

    ``labels`` name the validation metrics.
    """

    def __init__(self, folder: Path, labels: MetricLabels) -> None:
        self._labels = labels
        folder = folder.resolve()
        self.files = RunFolder(folder.parent, folder.name)
        if not self.files.config.exists():
            nearest = did_you_mean(folder.name, {path.parent.name for path in folder.parent.glob("*/config.yaml")})
            raise ConfigError(f"{folder} is not a run folder: no config.yaml{nearest}; give runs/NAME")
        self._pace = Pace()
        self._alerts: dict[tuple[str, str], Record] = {}
        self._heard_s: float | None = None  # by the monotonic clock
        self._outcome: Outcome | None = None
        self._lock: str = "unknown"
        # Only the last MiB of a long file is read.
        self._tails = [RecordTail(path, recent_bytes=1 << 20) for path in (self.files.metrics, self.files.alerts)]

    def update(self) -> None:
        news = [record for tail in self._tails for record in tail.poll()]
        for record in news:
            self._pace.update(record)
            if record["kind"] == "alert":
                self._alerts[str(record.get("name")), str(record.get("subject"))] = record
        if news:
            # The first update uses the files' mtimes: times in the records come from another machine's clock.
            written_s = [tail.path.stat().st_mtime for tail in self._tails if tail.path.exists()]
            age_s = max(0.0, time.time() - max(written_s, default=0.0)) if self._heard_s is None else 0.0
            self._heard_s = time.monotonic() - age_s
        self._lock = lock_state(self.files.path)  # before the outcome, which is written while the lock is held
        self._outcome = self.files.read_outcome()

    @property
    def has_ended(self) -> bool:
        """True if no more records will come.

        A stopped or killed run may be resumed. If a process holds the lock, it is resuming: it removes the previous
        attempt's outcome once its data are prepared.
        """
        is_last = self._outcome is not None and self._outcome.status in ("finished", "diverged", "failed")
        return is_last and self._lock != "held"

    def lines(self) -> Iterator[str]:
        """Yield state, step, speed with the time left, last validation, what limits the speed, and alerts."""
        state = self._state()
        yield f"{self.files.path.name}: {state}"
        pace = self._pace
        if (step := pace.step) is not None:
            total = f" of {pace.total_steps:,} ({step['step'] / pace.total_steps:.0%})" if pace.total_steps else ""
            yield f"  step {step['step']:,}{total}, loss {loss_text(step)}"
            speed = [f"  {amount(pace.tokens_per_s())} tokens/s"]
            if (step_s := pace.seconds_per_step()) is not None:
                speed.append(f"{step_s:.3g} s per step")
            if state == "running" and (left_s := pace.seconds_left()) is not None:
                speed.append(f"{duration(left_s)} left")
            yield ", ".join(speed)
            if pace.validation is not None:
                yield f"  step {pace.validation['step']:,}: {describe_validation(pace.validation, self._labels)}"
            yield f"  {limiting_factor(self._facts()) or 'no bottleneck measured'}"
        yield from (f"  {tail.problem}" for tail in self._tails if tail.problem)
        for alert in self._alerts.values():
            if alert.get("state") == "raised":
                yield f"  {describe_alert(alert)}"

    def _state(self) -> str:
        if self._outcome is not None:  # before the lock, which an orderly end releases too
            return f"{self._outcome.status}, {self._outcome.message}"
        if self._lock == "left":
            return f"ended without an outcome (probably killed), {saved_steps(self.files)[1]}"
        if self._pace.step is None:
            return "starting, no step completed yet"
        assert self._heard_s is not None  # of the step
        # Quiet: no record for a minute, or for three usual steps if these are longer.
        if time.monotonic() - self._heard_s > max(60.0, 3 * (self._pace.seconds_per_step() or 0.0)):
            return "quiet: in a long validation, or ended without notice"
        return "running"

    def _facts(self) -> Facts:
        # Read by key, not by the schema: a run of another version has a status too.
        config, _ = read_file(self.files.config)
        training = config.get("training", {})
        return Facts(
            self._pace.shares(),
            precision=training.get("precision"),
            compile=training.get("compile"),
            stage=config.get("deepspeed", {}).get("stage"),
        )
