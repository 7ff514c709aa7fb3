"""What a log of GPUs tells: phases, throttling, what was waited for, memory, and what to do about it.

In: a log as :func:`monitoring.gpu_log.reader.read_gpu_log` gives it. Out: for each GPU its :class:`Phase` s, figures
and :class:`Finding` s, each with what was seen and what to do, the costliest first. Nothing is found in a log of a GPU
that works all the time. How GPUs are told to be busy is in :mod:`monitoring.gpu_log.busy_time`; what slowed them in
:mod:`monitoring.gpu_log.throttling`; what they waited for in :mod:`monitoring.gpu_log.idle_gaps`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from monitoring.gpu_log.busy_time import BusyTime, Floats, Mask, Span, runs
from monitoring.gpu_log.idle_gaps import Cause, GapGroup, group_gaps, is_short
from monitoring.gpu_log.memory_growth import lasting_growth
from monitoring.gpu_log.reader import GpuLog, Trace
from monitoring.gpu_log.throttling import Throttling, clock_share, find_throttling, held_by_settings

PhaseKind = Literal["start-up", "steady", "idle", "checkpoint", "end", "unused"]
FindingName = Literal[
    "thermal_throttling",
    "power_throttling",
    "held_clocks",
    "loader_gaps",
    "checkpoint_gaps",
    "sync_gaps",
    "periodic_gaps",
    "unknown_gaps",
    "low_utilization",
    "light_load",
    "memory_leak",
    "memory_near_limit",
    "memory_unused",
    "ecc_errors",
    "unused",
]

FEW_SAMPLES = 30
"""Fewer say little."""
_LOST_SHARE = {"checkpoint": 0.02, "sync": 0.02, "loader": 0.02, "periodic": 0.02, "unknown": 0.02}
"""Of the time at work, in gaps of a cause, from which on it is told."""
_LEAST_GAPS = {"checkpoint": 1, "sync": 5, "loader": 5, "periodic": 4, "unknown": 1}
_THERMAL_SHARE, _POWER_SHARE = 0.01, 0.05
"""Of the busy samples. Cards touch their power limit in passing; none should be too hot."""
_LEAST_THROTTLED = 3
_LEAST_POWER_LOSS = 0.03
"""Of the highest clock: a power cap that takes less is how cards are meant to run."""
_LOW_PERCENT = 70.0
_LIGHT_SHARE = 0.4
_NEAR_LIMIT_SHARE, _UNUSED_SHARE = 0.95, 0.6
_BRIDGE = 3


@dataclass(frozen=True)
class Phase:
    """A stretch of the log, in seconds since its first sample."""

    kind: PhaseKind
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        name: of its kind.
        message: what was seen, in one line.
        advice: what to do, in one line.
        lost_share: of the GPU's work that it costs, as far as can be told; 0 if it can't.
        spans_s: stretches of the log where it is seen, in seconds since its first sample.
    """

    name: FindingName
    message: str
    advice: str
    lost_share: float
    spans_s: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class GpuDiagnosis:
    """One GPU.

    Attributes:
        gpu: its label in the log.
        name: its model.
        figures: of its whole time at work; what is not known is left out.
        phases: from the first sample to the last.
        findings: the costliest first; none where all is well.
        notes: what could not be judged, and why.
    """

    gpu: str
    name: str
    figures: Mapping[str, float]
    phases: tuple[Phase, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Analysis:
    """A log.

    Attributes:
        log: path of the file.
        start: its first sample's time, as it stands there.
        seconds: that it covers.
        interval_s: usual distance between samples.
        gpus: one diagnosis each.
        notes: of the log as a whole.
    """

    log: str
    start: str
    seconds: float
    interval_s: float
    gpus: tuple[GpuDiagnosis, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def analyse(log: GpuLog) -> Analysis:
    """Diagnose every GPU of a log."""
    traces = log.gpus or log.hosts
    busy_times = [BusyTime(trace.time_s, trace.get("util_percent")) for trace in traces]
    seconds = max((float(trace.time_s[-1]) for trace in traces), default=0.0)
    interval_s = float(np.median([busy_time.interval_s for busy_time in busy_times])) if busy_times else 0.0
    diagnoses = []
    for place, trace in enumerate(log.gpus):
        neighbours = [
            (other, busy_times[index])
            for index, other in enumerate(log.gpus)
            if index != place and other.host == trace.host
        ]
        diagnoses.append(_Diagnosing(trace, busy_times[place], neighbours).diagnosis())
    notes = [] if log.gpus else ["the log has no GPU, only the machine's own figures"]
    notes += [note for trace in log.hosts for note in _host_growth(trace)]
    return Analysis(str(log.path), log.start, seconds, interval_s, tuple(diagnoses), tuple(notes))


def _host_growth(trace: Trace) -> list[str]:
    """The machine's memory, that of the watched processes first: whole machines fill for many reasons."""
    total = _top(trace.get("host_total_bytes"))
    for figure, words in (("watched_rss_bytes", "of the watched processes"), ("host_used_bytes", "of the machine")):
        growth = lasting_growth(trace.time_s, trace.get(figure), total) if trace.has(figure) else None
        if growth:
            pace = f"{growth.bytes_per_s * 3600 / 2**30:.2f} GiB an hour"
            return [f"memory {words} grows by {pace}; the machine's is full in {_duration(growth.full_in_s)}"]
    return []


class _Diagnosing:
    """All that is asked of one GPU."""

    def __init__(self, trace: Trace, busy_time: BusyTime, neighbours: Sequence[tuple[Trace, BusyTime]]) -> None:
        self._trace = trace
        self._busy = busy_time
        self._groups = group_gaps(trace, busy_time, neighbours)
        self._work_s = busy_time.seconds(busy_time.work)

    def diagnosis(self) -> GpuDiagnosis:
        if self._busy.level_percent == 0:
            findings = [self._unused()] if self._trace.has("util_percent") else []
        else:
            asked: Sequence[Callable[[], list[Finding]]] = (self._slowed, self._waited, self._loaded, self._memory)
            findings = sorted((found for ask in asked for found in ask()), key=lambda finding: -finding.lost_share)
        return GpuDiagnosis(
            self._trace.gpu, self._trace.name, self._figures(), self._phases(), tuple(findings), tuple(self._notes())
        )

    # What was seen

    def _figures(self) -> dict[str, float]:
        trace, busy, steady = self._trace, self._busy, self._busy.steady
        inside = busy.work.samples
        power = trace.get("power_w")
        total = _top(trace.get("mem_total_bytes"))
        figures = {
            "work_s": self._work_s,
            "idle_in_work_share": sum(group.lost_s for group in self._groups) / self._work_s if self._work_s else 0.0,
            "util_mean_percent": _mean(trace.get("util_percent")[inside], busy.weight_s[inside]),
            "util_usual_percent": busy.level_percent,
            "memory_peak_bytes": _top(trace.get("mem_used_bytes")),
            "memory_total_bytes": total,
            "memory_peak_share": _top(trace.get("mem_used_bytes")) / total if total > 0 else np.nan,
            "temperature_max_c": _top(trace.get("temperature_c")),
            "power_mean_w": _mean(power[steady], busy.weight_s[steady]),
            "power_limit_w": _top(trace.get("power_limit_w")),
            "energy_kwh": float(np.nansum(power * busy.weight_s)) / 3.6e6 if trace.has("power_w") else np.nan,
            "clock_mean_mhz": _mean(trace.get("sm_clock_mhz")[steady], busy.weight_s[steady]),
            "clock_mean_share": _mean(clock_share(trace, steady)[steady], busy.weight_s[steady]),
        }
        return {name: float(value) for name, value in figures.items() if np.isfinite(value)}

    def _phases(self) -> tuple[Phase, ...]:
        """Start-up, then steady work broken by checkpoints and long gaps, then the end."""
        busy, count = self._busy, len(self._trace.time_s)
        if busy.work.first == busy.work.last:
            return (self._phase("unused", Span(0, count)),)
        breaks: list[tuple[Span, PhaseKind]] = []
        for group in self._groups:
            for gap in group.gaps:
                if group.cause == "checkpoint":
                    breaks.append((gap, "checkpoint"))
                elif not is_short(busy.seconds(gap), busy.interval_s):
                    breaks.append((gap, "idle"))
        pieces: list[tuple[Span, PhaseKind]] = [(Span(0, busy.work.first), "start-up")]
        place = busy.work.first
        for gap, kind in sorted(breaks, key=lambda item: item[0].first):
            pieces += [(Span(place, gap.first), "steady"), (gap, kind)]
            place = gap.last
        pieces += [(Span(place, busy.work.last), "steady"), (Span(busy.work.last, count), "end")]
        return tuple(self._phase(kind, span) for span, kind in pieces if span.last > span.first)

    def _notes(self) -> list[str]:
        notes = []
        if len(self._trace.time_s) < FEW_SAMPLES:
            notes.append(f"{len(self._trace.time_s)} samples are few to judge by")
        absent = {
            "util_percent": "utilisation is not known, so that nothing can be said of phases and gaps",
            "throttle_reasons": "no throttle reasons: throttling is judged by clocks alone",
            "power_limit_w": "no power limit: power throttling is told by throttle reasons alone",
            "temperature_c": "no temperature: thermal throttling is told by throttle reasons alone",
        }
        notes += [words for name, words in absent.items() if not self._trace.has(name)]
        if self._busy.interval_s > SHORT_INTERVAL_S:
            notes.append(f"samples are {self._busy.interval_s:.0f} s apart: shorter gaps can't be seen")
        return notes

    # What is not as it should be

    def _unused(self) -> Finding:
        return Finding(
            "unused",
            f"did nothing in {_duration(float(self._trace.time_s[-1]))}",
            "use it (ray.num_workers), or leave it to others (CUDA_VISIBLE_DEVICES)",
            0.0,
            (),
        )

    def _slowed(self) -> list[Finding]:
        thermal, power = find_throttling(self._trace, self._busy)
        found = []
        if self._enough(thermal.mask, _THERMAL_SHARE):
            peak = _top(self._trace.get("temperature_c"))
            hot = f" at up to {peak:.0f} °C" if np.isfinite(peak) else ""
            found.append(
                self._throttled(
                    "thermal_throttling",
                    thermal,
                    f"too hot in {{share}} of its busy time{hot}",
                    "better cooling: airflow, dust, fan curve, room; or a lower power limit (nvidia-smi -pl), which "
                    "costs less than throttling",
                )
            )
        if self._enough(power.mask, _POWER_SHARE) and self._costs(power):
            limit = _top(self._trace.get("power_limit_w"))
            watts = f" of {limit:.0f} W" if np.isfinite(limit) else ""
            found.append(
                self._throttled(
                    "power_throttling",
                    power,
                    f"held by its power limit{watts} in {{share}} of its busy time",
                    "raise the limit if the card and its supply allow it (nvidia-smi -q -d POWER shows the highest); "
                    "otherwise this is its speed",
                )
            )
        held = held_by_settings(self._trace) & self._busy.steady
        share = clock_share(self._trace, self._busy.steady)
        if not found and self._enough(held, 0.5) and _mean(share[held]) < 0.9:
            found.append(
                Finding(
                    "held_clocks",
                    f"clocks are held at {100 * _mean(share[held]):.0f} % of the highest by a setting",
                    "nvidia-smi -rac and -rgc give them free",
                    1 - _mean(share[held]),
                    self._spans(held),
                )
            )
        return found

    def _throttled(self, name: FindingName, throttling: Throttling, message: str, advice: str) -> Finding:
        share = self._share(throttling.mask)
        lost = 100 * throttling.lost_share
        clocks = f", clocks {lost:.0f} % under the highest" if lost > 0 else ""
        sources = [
            words
            for words, mask in (("throttle reasons", throttling.by_reason), ("clocks", throttling.by_clock))
            if self._share(mask) >= 0.5 * share
        ]
        told = f" (told by {' and '.join(sources)})" if sources else ""
        return Finding(
            name,
            message.format(share=_percent(share)) + clocks + told,
            advice,
            share * throttling.lost_share,
            self._spans(throttling.mask),
        )

    def _costs(self, power: Throttling) -> bool:
        return not np.isfinite(power.clock_share[power.mask]).any() or power.lost_share >= _LEAST_POWER_LOSS

    def _waited(self) -> list[Finding]:
        found = []
        for group in self._groups:
            share = group.lost_s / self._work_s
            if len(group.gaps) < _LEAST_GAPS[group.cause] or share < _LOST_SHARE[group.cause]:
                continue
            name: FindingName = f"{group.cause}_gaps"  # type: ignore[assignment]
            spans = tuple(self._seconds(gap) for gap in group.gaps)
            found.append(Finding(name, _gap_message(group, share), _GAP_ADVICE[group.cause], share, spans))
        return found

    def _loaded(self) -> list[Finding]:
        """Load that is low throughout, without gaps that would explain it."""
        level, steady = self._busy.level_percent, self._busy.steady
        if level < _LOW_PERCENT:
            cpu = _mean(self._trace.get("cpu_percent")[steady])
            cpus = f", the CPUs' {cpu:.0f} %" if np.isfinite(cpu) else ""
            message = f"usual utilisation is {level:.0f} %{cpus}: it waits more often than a sample can tell apart"
            advice = (
                "if the data wait in metrics.jsonl is high, raise data.num_workers and data.prefetch; otherwise larger "
                "batches (batch.tokens) and training.compile, since the CPU does not launch kernels fast enough"
            )
            return [Finding("low_utilization", message, advice, 1 - level / 100, ())]
        share = _mean(self._trace.get("power_w")[steady] / self._trace.get("power_limit_w")[steady])
        if share < _LIGHT_SHARE:
            message = (
                f"some kernel runs {level:.0f} % of the time, at {100 * share:.0f} % of the power limit: most of the "
                "chip idles"
            )
            advice = (
                "larger batches (batch.tokens) or bf16 fill it; with several GPUs it may wait for the others within a "
                "collective, which counts as busy"
            )
            return [Finding("light_load", message, advice, 0.0, ())]
        return []

    def _memory(self) -> list[Finding]:
        used, total = self._trace.get("mem_used_bytes"), _top(self._trace.get("mem_total_bytes"))
        if not total > 0 or not self._trace.has("mem_used_bytes"):
            return []
        peak, found = _top(used) / total, []
        inside = self._busy.work.samples
        growth = lasting_growth(self._trace.time_s[inside], used[inside], total)
        if growth:
            message = (
                f"memory grows by {growth.bytes_per_s * 3600 / 2**30:.2f} GiB an hour "
                f"({growth.risen_bytes / 2**30:.1f} GiB in this log); it is full in {_duration(growth.full_in_s)}"
            )
            advice = (
                "look for tensors that are kept from step to step: losses summed without .item(), lists of outputs, "
                "growing caches; torch.cuda.memory._record_memory_history() names who allocates"
            )
            found.append(Finding("memory_leak", message, advice, 0.0, (self._seconds(self._busy.work),)))
        if peak >= _NEAR_LIMIT_SHARE:
            message = f"peak memory is {100 * peak:.0f} % of {total / 2**30:.0f} GiB: one longer batch may not fit"
            advice = "lower batch.tokens by a tenth, or set model.backbone.gradient_checkpointing"
            found.append(Finding("memory_near_limit", message, advice, 0.0, self._spans(used >= 0.95 * total)))
        elif peak < _UNUSED_SHARE and not growth:
            message = f"peak memory is {100 * peak:.0f} % of {total / 2**30:.0f} GiB"
            advice = "python -m tools find_batch_size finds the fastest batch.tokens; larger ones would fit"
            found.append(Finding("memory_unused", message, advice, 0.0, ()))
        errors = self._trace.get("ecc_uncorrected")
        if np.isfinite(errors).any() and np.nanmax(errors) > np.nanmin(errors):
            count = int(np.nanmax(errors) - np.nanmin(errors))
            advice = "results since then may be wrong: go back to a checkpoint before it, and have the GPU looked at"
            spans = self._spans(np.append(False, np.diff(errors) > 0))
            found.append(Finding("ecc_errors", f"{count} uncorrected memory errors", advice, 0.0, spans))
        return found

    # Time

    def _enough(self, mask: Mask, share: float) -> bool:
        return int(mask.sum()) >= _LEAST_THROTTLED and self._share(mask) >= share

    def _share(self, mask: Mask) -> float:
        """Of the busy time."""
        busy_s = float(self._busy.weight_s[self._busy.steady].sum())
        return float(self._busy.weight_s[mask].sum()) / busy_s if busy_s else 0.0

    def _spans(self, mask: Mask) -> tuple[tuple[float, float], ...]:
        return tuple(self._seconds(span) for span in runs(mask, bridge=_BRIDGE))

    def _seconds(self, span: Span) -> tuple[float, float]:
        times = self._trace.time_s
        end = times[span.last] if span.last < len(times) else times[-1]
        return float(times[span.first]), float(end)

    def _phase(self, kind: PhaseKind, span: Span) -> Phase:
        return Phase(kind, *self._seconds(span))


SHORT_INTERVAL_S = 3.0
"""Samples farther apart miss a loader's gaps."""
_GAP_WORDS: Mapping[Cause, str] = {
    "loader": "waits for data",
    "checkpoint": "waits while checkpoints are written",
    "sync": "waits for the other GPUs, and they for it",
    "periodic": "stops regularly, as for a checkpoint or a validation",
    "unknown": "idles for no reason that the log shows",
}
_GAP_ADVICE: Mapping[Cause, str] = {
    "loader": (
        "raise data.num_workers and data.prefetch; python -m tools benchmark STORE says whether reading, tokenizing or "
        "packing is slow"
    ),
    "checkpoint": "set checkpoint.asynchronous, or write less often (checkpoint.every_steps), or to a faster disk",
    "sync": (
        "give each GPU as much work as the others: equal token budgets, the same model of GPU; fewer, larger steps "
        "(batch.global_tokens)"
    ),
    "periodic": (
        "if these are checkpoints, set checkpoint.asynchronous; if validations, look less often "
        "(training.evaluate_every_steps) or at fewer batches (training.evaluation_batches)"
    ),
    "unknown": "look at what the process does then: py-spy dump --pid PID, or a trace by torch.profiler",
}


def _gap_message(group: GapGroup, share: float) -> str:
    every = ""
    if group.every_s is not None and group.regular:
        every = f", every {_duration(group.every_s)}"
    count = f"{len(group.gaps)} gap" + ("s" if len(group.gaps) > 1 else "")
    evidence = f" ({group.evidence})" if group.evidence else ""
    length = f"{count} of {_duration(group.usual_s)}{every}"
    return f"{_GAP_WORDS[group.cause]}: {_percent(share)} of its time in {length}{evidence}"


def _top(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else float("nan")


def _mean(values: Floats, weights: Floats | None = None) -> float:
    known = np.isfinite(values)
    if not known.any():
        return float("nan")
    return float(np.average(values[known], weights=None if weights is None else weights[known]))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
