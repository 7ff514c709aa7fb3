"""Rules of the alerts: what of a run's records is worth a warning.

A rule takes records and yields findings: that something holds of a GPU, a machine or a worker, or is over, or, in the
band between its two thresholds, neither. :mod:`monitoring.watch.alerts` decides how long a finding must last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

from monitoring.advice import Facts, advise
from monitoring.sampling.nvml import POWER_REASONS, SLOWDOWN, THERMAL_REASONS, describe_throttling
from run_folder.metrics_log import Record
from train_config.monitoring_schema import AlertsSection

BAND_PERCENT = 5.0
"""Points between the threshold of a share and what counts as over."""
THROTTLED_S = 30.0
"""Seconds of lowered clocks that are worth a warning; a peak of power is none."""
UNTHROTTLED_S = 60.0
FINITE_RECORDS = 3
"""Finite losses in a row after which the loss counts as finite again."""
LEAK_EPOCHS = 5
"""Epochs whose peaks are compared, without a process's first, in which caches fill. Odd, so that peaks that only go up
and down have a median growth of none."""
LEAK_FLOOR_BYTES = 16 << 20
"""Growth in an epoch that may be the allocator's own."""
GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """``holds``: True or False, or None where neither is said. The message is for the state that it brings about."""

    subject: str
    holds: bool | None
    message: str


class Rule(ABC):
    """Finds one kind of problem, which must hold, or be over, for so many seconds to be reported."""

    name = ""
    raises_after_s = clears_after_s = 0.0

    @abstractmethod
    def take(self, record: Record) -> Iterator[Finding]:
        """Yield what a record shows."""


def rules(settings: AlertsSection) -> list[Rule]:
    """Return one of each."""
    return [LowUtilization(settings), NearlyFull(settings), Leak(settings), Throttling(), NonfiniteLoss()]


class LowUtilization(Rule):
    """A GPU that works for the run, and too little. One that never did anything counts as another's."""

    name = "low_utilization"

    def __init__(self, settings: AlertsSection) -> None:
        self.raises_after_s = settings.utilization_window_s
        self.clears_after_s = settings.utilization_window_s / 2
        self._least = settings.utilization_percent
        self._worked: set[str] = set()
        self._low: dict[str, list[float]] = {}  # by GPU, since it is under the threshold
        self._steps: dict[int, tuple[str, Mapping[str, float]]] = {}  # by worker: its machine and its last step

    def take(self, record: Record) -> Iterator[Finding]:
        if record["kind"] != "sample" or record["step"] < 1:
            return
        own = f"worker/{record['worker']}/"
        step = {k.removeprefix(own): v for k, v in record["figures"].items() if k.startswith(own) and v is not None}
        self._steps[record["worker"]] = (record["host"], step)
        for index, values in _gpus(record).items():
            if (percent := values.get("util")) is None:
                continue
            gpu = f"GPU {index} on {record['host']}"
            if percent > 0:
                self._worked.add(gpu)
            if gpu in self._worked:
                yield self._judge(gpu, percent, record["host"])

    def _judge(self, gpu: str, percent: float, host: str) -> Finding:
        if percent >= self._least:
            self._low.pop(gpu, None)
            over = percent >= min(100.0, self._least + BAND_PERCENT)
            return Finding(gpu, False if over else None, f"{gpu}: utilisation is {percent:.0f} % again")
        low = self._low.setdefault(gpu, [])
        low.append(percent)
        message = (
            f"{gpu}: utilisation under {self._least:g} % for {self.raises_after_s:g} s, {mean(low):.0f} % on average: "
            f"{self._reason(host)}"
        )
        return Finding(gpu, True, message)

    def _reason(self, host: str) -> str:
        """The part of a step for which it waits most, by the workers of this machine."""
        steps = [step for where, step in self._steps.values() if where == host and step.get("step_s")]
        if not steps:
            return "how a step's time is spent is not known"

        def share(part: str) -> float:
            return sum(step.get(part, 0.0) / step["step_s"] for step in steps) / len(steps)

        data_wait = share("data_wait_s")
        facts = Facts(data_wait=data_wait, communication=share("communication_s"), checkpoint=share("checkpoint_s"))
        if found := advise(facts):
            return f"{found[0].finding}: {found[0].actions[0].text}"
        return f"data is not the reason ({data_wait:.0%} of a step): raise batch.tokens to give it more work"


class NearlyFull(Rule):
    """Memory of a GPU or of a machine that has little left."""

    name = "memory"

    def __init__(self, settings: AlertsSection) -> None:
        self._most = settings.memory_percent

    def take(self, record: Record) -> Iterator[Finding]:
        if record["kind"] != "sample":
            return
        for index, values in _gpus(record).items():
            used, total = values.get("mem_used_bytes"), values.get("mem_total_bytes")
            remedy = "lower batch.tokens or set model.backbone.gradient_checkpointing"
            yield from self._judge(f"GPU {index} on {record['host']}", used, total, remedy)
        used, total = (record["figures"].get(f"mem/host_{part}_bytes") for part in ("used", "total"))
        remedy = "lower data.num_workers or data.prefetch, or stop what else runs there"
        yield from self._judge(f"host {record['host']}", used, total, remedy)

    def _judge(self, subject: str, used: float | None, total: float | None, remedy: str) -> Iterator[Finding]:
        if used is None or not total:
            return
        percent = 100 * used / total
        state = f"{subject}: {used / GIB:.1f} of {total / GIB:.1f} GiB of memory in use ({percent:.0f} %)"
        if percent >= self._most:
            yield Finding(subject, True, f"{state}: {remedy}")
        else:
            yield Finding(subject, False if percent < self._most - BAND_PERCENT else None, state)


class Leak(Rule):
    """Peaks of a worker's memory that grow from epoch to epoch."""

    name = "leak"
    _METRICS = {"torch_peak_bytes": "GPU memory in tensors", "rss_bytes": "resident memory"}  # noqa: RUF012

    def __init__(self, settings: AlertsSection) -> None:
        self._percent = settings.leak_percent_per_epoch
        self._peaks: dict[tuple[int, str], deque[tuple[int, float]]] = {}

    def take(self, record: Record) -> Iterator[Finding]:
        if record["kind"] == "event" and record["event"] in ("started", "resumed"):
            self._peaks.clear()  # these are new processes
        if record["kind"] != "sample":
            return
        worker, epoch = record["worker"], record["epoch"]
        for name, words in self._METRICS.items():
            value = record["figures"].get(f"worker/{worker}/{name}")
            if value is None:
                continue
            # One more than is compared: the last epoch is not over.
            peaks = self._peaks.setdefault((worker, name), deque([(epoch, value)]))
            last_epoch, last_peak = peaks[-1]
            if epoch > last_epoch:
                if len(peaks) > LEAK_EPOCHS:
                    yield self._judge(f"worker {worker}, {words}", list(peaks)[1:])
                    peaks.popleft()
                peaks.append((epoch, value))
            else:
                peaks[-1] = (last_epoch, max(last_peak, value))

    def _judge(self, subject: str, peaks: list[tuple[int, float]]) -> Finding:
        """Judge by the median of the steps from peak to peak, which one longer batch does not change."""
        growth = median((b - a) / (later - earlier) for (earlier, a), (later, b) in pairwise(peaks))
        least = max(self._percent / 100 * peaks[0][1], LEAK_FLOOR_BYTES)
        epoch, peak = peaks[-1]
        if growth >= least:
            message = (
                f"{subject}: the peak grows by {growth / GIB:.2f} GiB ({100 * growth / peaks[0][1]:.1f} %) an epoch, "
                f"{peak / GIB:.2f} GiB in epoch {epoch}: something is kept from step to step"
            )
            return Finding(subject, True, message)
        return Finding(subject, False if growth < least / 2 else None, f"{subject}: the peak grows no more")


class Throttling(Rule):
    """Clocks that are lowered because a GPU is too hot or draws too much power."""

    name = "throttling"
    raises_after_s = THROTTLED_S
    clears_after_s = UNTHROTTLED_S
    _CAUSES = {  # noqa: RUF012 - never changed
        "thermal": (THERMAL_REASONS, "look at its cooling"),
        "power": (POWER_REASONS, "its power limit or the machine's supply holds it back"),
        "hardware": (SLOWDOWN, "look at its cooling and power supply"),
    }

    def take(self, record: Record) -> Iterator[Finding]:
        if record["kind"] != "sample":
            return
        for index, values in _gpus(record).items():
            if (reasons := values.get("throttle_reasons")) is None:
                continue
            bits = int(reasons)
            if bits & (THERMAL_REASONS | POWER_REASONS):
                bits &= ~SLOWDOWN  # explained by the others
            for cause, (mask, remedy) in self._CAUSES.items():
                gpu = f"GPU {index} on {record['host']}"
                words = ", ".join(describe_throttling(bits & mask))
                message = f"is throttled ({words}): {remedy}" if words else f"no {cause} throttling any more"
                temperature = f", {values['temperature_c']:.0f} °C" if "temperature_c" in values else ""
                yield Finding(f"{gpu}, {cause}", bool(words), f"{gpu}{temperature}: {message}")


class NonfiniteLoss(Rule):
    """A loss that is NaN or infinite."""

    name = "nonfinite_loss"

    def __init__(self) -> None:
        self._finite = 0

    def take(self, record: Record) -> Iterator[Finding]:
        if record["kind"] != "train" or "loss" not in record:
            return
        step = record["step"]
        if record["loss"] is None:
            self._finite = 0
            remedy = "lower training.learning_rate, or look at the records listed in the run's folder nonfinite"
            yield Finding("loss", True, f"the loss is not finite at step {step}: {remedy}")
        else:
            self._finite += 1
            yield Finding("loss", False if self._finite >= FINITE_RECORDS else None, f"finite again at step {step}")


class OwnGpus:
    """The GPUs of each machine that are the run's own: NVML shows those of other jobs too."""

    def __init__(self) -> None:
        self._of_workers: dict[str, set[str]] = {}

    def only(self, record: Record) -> Record:
        """Return a sample without the values of GPUs on which no worker of the run computes.

        All are left where UUIDs are not known, or match none, as with MIG, whose slices have other ones.
        """
        if record["kind"] != "sample":
            return record
        own = self._of_workers.setdefault(str(record["host"]), set())
        if "gpu" in record:
            own.add(record["gpu"])
        uuids: Mapping[str, str] = record.get("gpus", {})
        if not own & set(uuids.values()):
            return record
        others = tuple(f"gpu/{index}/" for index, uuid in uuids.items() if uuid not in own)
        own_values = {name: value for name, value in record["figures"].items() if not name.startswith(others)}
        return {**record, "figures": own_values}


def _gpus(record: Record) -> dict[str, dict[str, float]]:
    """The known values of each GPU of a sample, by its number and the last part of their names."""
    found: dict[str, dict[str, float]] = {}
    for name, value in record["figures"].items():
        if value is not None and name.startswith("gpu/"):
            _, index, metric = name.split("/")
            found.setdefault(index, {})[metric] = value
    return found
