"""Analysis of a GPU log: utilisation, idle share, memory and throttling of each GPU, and advice about them."""

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from esmeray.common.text import counted
from esmeray.monitoring.advice import Advice, Facts, advise
from esmeray.monitoring.gpu_log.reader import NAME, TIME, GpuLog
from esmeray.monitoring.sampling.nvml import POWER_REASONS, SLOWDOWN, THERMAL_REASONS

HOT_C = 80.0
"""From here on lowered clocks are put down to heat. NVIDIA's slowdown temperatures lie between 83 and 95 °C."""
_LOW_CLOCK_SHARE, _FULL_CLOCK_SHARE = 0.9, 0.97
"""Shares of the highest clock: below the first, a hot GPU or one at its power limit is throttled; above the second, a
power limit costs no speed."""
_AT_LIMIT_SHARE = 0.97
"""From this share of the power limit on, a GPU is at it: drivers hold the mean a little below."""
_SUSTAINED_SAMPLES = 3
"""Clocks take a moment to follow the load; shorter stretches are no throttling."""
_CLOCK_SETTINGS = 0x002 | 0x010 | 0x100
"""NVML's bits of clocks lowered by a setting: application clocks, sync boost, display clocks."""


class GpuSummary(NamedTuple):
    """One GPU, by its label in the log. A value that the log lacks is None.

    Attributes:
        work_s: time from the first to the last work, without holes in the log.
        utilisation, idle: mean utilisation, and share with almost none, of that time.
        power_mean_w, clock_share: mean power, and mean clock as a share of the highest, while busy.
        thermal, power_capped: shares of the busy time with clocks lowered for heat, or for power.
        spans_s: stretches by these names, in seconds since the log's first sample.
        notes: what could not be judged, and memory errors.
    """

    gpu: str
    name: str
    work_s: float
    utilisation: float | None
    idle: float | None
    memory_peak_bytes: float | None
    memory_total_bytes: float | None
    temperature_max_c: float | None
    power_mean_w: float | None
    clock_share: float | None
    thermal: float | None
    power_capped: float | None
    spans_s: dict[str, list[tuple[float, float]]]
    advice: list[Advice]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        return self._asdict() | {
            "advice": [
                {"topic": entry.topic, "finding": entry.finding, "actions": [action.text for action in entry.actions]}
                for entry in self.advice
            ]
        }

    def __str__(self) -> str:
        parts = [
            ("utilisation {:.0%} at work", self.utilisation),
            ("idle {:.0%}", self.idle),
            ("peak memory {:.1f}", self.memory_peak_bytes and self.memory_peak_bytes / 2**30),
            ("of {:.0f} GiB", self.memory_total_bytes and self.memory_total_bytes / 2**30),
            ("at most {:.0f} °C", self.temperature_max_c),
            ("{:.0f} W on average", self.power_mean_w),
            ("clocks at {:.0%}", self.clock_share),
        ]
        known = ", ".join(words.format(value) for words, value in parts if value is not None).replace(", of ", " of ")
        return f"GPU {self.gpu}: {known}" + ("" if self.advice else "; nothing is amiss")


def summarise(log: GpuLog) -> list[GpuSummary]:
    return [_summary(gpu, rows) for gpu, rows in log.gpus.items()]


def interval_s(rows: pd.DataFrame) -> float:
    """Return the usual distance between samples; 1 for a single one."""
    steps = rows[TIME].diff()
    usual = float(steps[steps > 0].median())
    return usual if math.isfinite(usual) else 1.0


def _summary(gpu: str, rows: pd.DataFrame) -> GpuSummary:
    usual = interval_s(rows)
    # Each sample stands for the time until the next: nvidia-smi falls behind on a machine under load.
    # Beyond three usual distances the log has a hole.
    weights = (-rows[TIME].diff(-1)).fillna(usual).clip(upper=3.0 * usual)
    working, busy = _work(rows["util"])
    thermal, power_capped = _throttling(rows, busy)
    facts = Facts(
        utilisation=_mean(rows["util"] / 100, weights, working),
        idle=_mean(~busy, weights, working),
        power=_mean(rows["power_w"] / rows["power_limit_w"], weights, busy),
        thermal=_share(thermal, weights, busy),
        power_capped=_share(power_capped, weights, busy),
        # Of a GPU that did nothing the memory says nothing.
        memory=_known((rows["mem_used_bytes"].max() / rows["mem_total_bytes"].max()) if working.any() else math.nan),
    )
    spans = {"idle": working & ~busy, "thermal": thermal, "power_capped": power_capped}
    return GpuSummary(
        gpu=gpu,
        name=next(filter(None, rows[NAME]), ""),
        work_s=float(weights[working].sum()),
        utilisation=facts.utilisation,
        idle=facts.idle,
        memory_peak_bytes=_known(rows["mem_used_bytes"].max()),
        memory_total_bytes=_known(rows["mem_total_bytes"].max()),
        temperature_max_c=_known(rows["temperature_c"].max()),
        power_mean_w=_mean(rows["power_w"], weights, busy),
        clock_share=_mean(_clock_share(rows, busy), weights, busy),
        thermal=facts.thermal,
        power_capped=facts.power_capped,
        spans_s={name: _spans(rows[TIME], mask) for name, mask in spans.items()},
        advice=advise(facts),
        notes=_notes(rows, bool(working.any())),
    )


def _work(utilisation: pd.Series) -> tuple[pd.Series, pd.Series]:
    """Masks of the samples from the first work to the last, and of the busy ones; unknown counts as the one before."""
    busy = utilisation.ffill() >= 10.0  # percent
    # By the median of five samples, so that a stray kernel is no work.
    # And busy: the median alone would begin before the first kernel.
    work = busy & (busy.astype(float).rolling(5, center=True, min_periods=1).median() > 0.5)
    working = work.cummax() & work[::-1].cummax()[::-1]
    return working, working & busy


def _throttling(rows: pd.DataFrame, busy: pd.Series) -> tuple[pd.Series, pd.Series]:
    """Masks of busy samples with clocks lowered for heat, and for power.

    Reasons or clocks alone are enough: logs lack the one or the other, and both are read at different moments.
    """
    reasons = rows["throttle_reasons"].fillna(0).astype(int)
    share = _clock_share(rows, busy)
    hot = rows["temperature_c"] >= HOT_C
    at_limit = rows["power_w"] >= _AT_LIMIT_SHARE * rows["power_limit_w"]
    # Somebody who sets lower clocks knows it: that is no throttling.
    slow = busy & (share < _LOW_CLOCK_SHARE) & (reasons & _CLOCK_SETTINGS == 0)
    stretch = (slow != slow.shift()).cumsum()
    slow &= slow.groupby(stretch).transform("size") >= _SUSTAINED_SAMPLES
    thermal = busy & (reasons & THERMAL_REASONS != 0)
    power = busy & (reasons & POWER_REASONS != 0)
    unspecific = busy & (reasons & SLOWDOWN != 0) & ~thermal & ~power
    # The hardware's slowdown alone gives no reason: what is measured beside it does.
    thermal |= unspecific & hot
    power |= unspecific & ~hot & at_limit
    # Slow clocks without a reason: a GPU at its power limit is warm, too, so that the limit counts before the heat.
    slow_by_heat = slow & hot & ~at_limit & ~power
    slow_by_power = slow & at_limit & ~thermal
    # Not "below": where the clocks are not known, the reason counts.
    return thermal | slow_by_heat, (power | slow_by_power) & ~(share > _FULL_CLOCK_SHARE)


def _clock_share(rows: pd.DataFrame, busy: pd.Series) -> pd.Series:
    """SM clock as a share of the GPU's highest, or else of the highest in the log."""
    clock, highest = rows["sm_clock_mhz"], rows["sm_clock_max_mhz"]
    # Nearly the highest of the log: a stray value must not make all others look low.
    return clock / (highest.where(highest > 0) if highest.notna().any() else clock[busy].quantile(0.99))


def _spans(times: pd.Series, mask: pd.Series) -> list[tuple[float, float]]:
    """Begin and end of each stretch where ``mask`` holds; an end is the time of the sample after it."""
    # False at both ends, so that a stretch that begins or ends with the log has both its edges.
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    ends = np.minimum(edges[1::2], len(times) - 1)
    return list(zip(times.iloc[edges[::2]].tolist(), times.iloc[ends].tolist(), strict=True))


def _notes(rows: pd.DataFrame, worked: bool) -> list[str]:
    notes = []
    if rows["throttle_reasons"].isna().all():
        notes.append("no throttle reasons: throttling is detected by clocks alone")
    if len(rows) < 30:
        notes.append(f"{counted(len(rows), 'sample{s}')} are few to judge by")
    if not worked and rows["util"].notna().any():
        notes.append("did nothing: use it (ray.num_workers), or leave it to others (CUDA_VISIBLE_DEVICES)")
    errors = rows["ecc_uncorrected"].dropna()  # counted since the driver was loaded: growth alone is of this log
    if len(errors) and errors.max() > errors.min():
        when = rows[TIME][errors[errors > errors.iloc[0]].index[0]]
        count = counted(int(errors.max() - errors.min()), "uncorrected memory error{s}")
        notes.append(f"{count}, the first after {when:.0f} s: results since then may be wrong")
    return notes


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _mean(values: pd.Series, weights: pd.Series, where: pd.Series) -> float | None:
    """Mean over the samples of ``where``, each weighted by the seconds that it stands for."""
    known = where & values.notna()
    return float(np.average(values[known], weights=weights[known])) if known.any() else None


def _share(mask: pd.Series, weights: pd.Series, within: pd.Series) -> float:
    """Share of the time of ``within``; none for a sample or two."""
    return float(weights[mask & within].sum() / weights[within].sum()) if mask.sum() >= _SUSTAINED_SAMPLES else 0.0
