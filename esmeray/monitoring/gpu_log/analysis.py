"""Analysis of a GPU log: utilisation, idle share, memory and throttling of each GPU, with advice."""

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from esmeray.common.text import counted
from esmeray.monitoring.advice import Advice, Facts, advise
from esmeray.monitoring.gpu_log.reader import NAME, TIME, GpuLog
from esmeray.monitoring.sampling.nvml import POWER_REASONS, SLOWDOWN, THERMAL_REASONS

HOT_C = 80.0
"""Temperature in °C from which lowered clocks count as thermal throttling. NVIDIA's slowdown temperatures are 83 to 95
°C."""
_LOW_CLOCK_SHARE, _FULL_CLOCK_SHARE = 0.9, 0.97
"""Shares of the maximum clock. Below the first, a hot GPU or one at its power limit is throttled; above the second, a
power limit costs no speed."""
_AT_LIMIT_SHARE = 0.97
"""Share of the power limit from which a GPU counts as at its limit: drivers keep the mean a little below."""
_SUSTAINED_SAMPLES = 3
"""Minimum number of samples: clocks follow the load with a delay, so shorter stretches are not throttling."""
_CLOCK_SETTINGS = 0x002 | 0x010 | 0x100
"""NVML's bits of clocks lowered by a setting: application clocks, sync boost, display clocks."""


class GpuSummary(NamedTuple):
    """Summary of one GPU, by its label in the log.

    Attributes:
        values: by name; None if the log lacks them.

            - work_s: time from first to last work, without gaps in the log
            - utilisation, idle: mean utilisation, and share of nearly idle time, within that time
            - memory_peak_bytes, memory_total_bytes, temperature_max_c
            - power_mean_w, clock_share: mean power, and mean clock as a share of the maximum, while busy
            - thermal, power_capped: shares of the busy time with clocks lowered for heat, or for power
        spans_s: stretches that are idle, thermal or power_capped, in seconds since the log's first sample.
        notes: limits of the analysis, and memory errors.
    """

    gpu: str
    name: str
    values: dict[str, float | None]
    spans_s: dict[str, list[tuple[float, float]]]
    advice: list[Advice]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {
            "gpu": self.gpu,
            "name": self.name,
            **self.values,
            "spans_s": self.spans_s,
            "advice": [
                {"topic": entry.topic, "finding": entry.finding, "actions": [action.text for action in entry.actions]}
                for entry in self.advice
            ],
            "notes": self.notes,
        }

    def __str__(self) -> str:
        parts = [
            ("utilisation {:.0%} while busy", "utilisation", 1),
            ("idle {:.0%}", "idle", 1),
            ("peak memory {:.1f}", "memory_peak_bytes", 2**30),
            ("of {:.0f} GiB", "memory_total_bytes", 2**30),
            ("at most {:.0f} °C", "temperature_max_c", 1),
            ("{:.0f} W on average", "power_mean_w", 1),
            ("clocks at {:.0%}", "clock_share", 1),
        ]
        found = [(words, self.values[name], unit) for words, name, unit in parts]
        known = [words.format(value / unit) for words, value, unit in found if value is not None]
        ending = "" if self.advice else "; no problems found"
        return f"GPU {self.gpu}: {', '.join(known).replace(', of ', ' of ')}{ending}"


def summarise(log: GpuLog) -> list[GpuSummary]:
    return [_summary(gpu, rows) for gpu, rows in log.gpus.items()]


def interval_s(rows: pd.DataFrame) -> float:
    """Return the median time between samples in seconds; 1 for a single sample."""
    steps = rows[TIME].diff()
    usual = float(steps[steps > 0].median())
    return usual if math.isfinite(usual) else 1.0


def _summary(gpu: str, rows: pd.DataFrame) -> GpuSummary:
    usual = interval_s(rows)
    # Each sample is weighted by the time until the next: nvidia-smi falls behind on a machine under load. Beyond three
    # usual intervals the log has a gap.
    weights = (-rows[TIME].diff(-1)).fillna(usual).clip(upper=3.0 * usual)
    working, busy = _work(rows["util"])
    worked = bool(working.any())
    thermal, power_capped = _throttling(rows, busy)
    peak_bytes, total_bytes = rows["mem_used_bytes"].max(), rows["mem_total_bytes"].max()
    shares = {
        "utilisation": _mean(rows["util"] / 100, weights, working),
        "idle": _mean(~busy, weights, working),
        "power": _mean(rows["power_w"] / rows["power_limit_w"], weights, busy),
        "thermal": _share(thermal, weights, busy),
        "power_capped": _share(power_capped, weights, busy),
        # Memory of a GPU without work is meaningless.
        "memory": _known(peak_bytes / total_bytes) if worked else None,
    }
    spans = {"idle": working & ~busy, "thermal": thermal, "power_capped": power_capped}
    return GpuSummary(
        gpu=gpu,
        name=next(filter(None, rows[NAME]), ""),
        values={
            "work_s": float(weights[working].sum()),
            "utilisation": shares["utilisation"],
            "idle": shares["idle"],
            "memory_peak_bytes": _known(peak_bytes),
            "memory_total_bytes": _known(total_bytes),
            "temperature_max_c": _known(rows["temperature_c"].max()),
            "power_mean_w": _mean(rows["power_w"], weights, busy),
            "clock_share": _mean(_clock_share(rows, busy), weights, busy),
            "thermal": shares["thermal"],
            "power_capped": shares["power_capped"],
        },
        spans_s={name: _spans(rows[TIME], mask) for name, mask in spans.items()},
        advice=advise(Facts(shares)),
        notes=_notes(rows, worked),
    )


def _work(utilisation: pd.Series) -> tuple[pd.Series, pd.Series]:
    """Return masks of the samples from first to last work, and of the busy ones.

    Unknown samples repeat the previous one.
    """
    busy = utilisation.ffill() >= 10.0  # percent
    # Median of five samples, so that a stray kernel does not count as work. The sample itself must be busy too: the
    # median alone would start before the first kernel.
    work = busy & (busy.astype(float).rolling(5, center=True, min_periods=1).median() > 0.5)
    working = work.cummax() & work[::-1].cummax()[::-1]
    return working, working & busy


def _throttling(rows: pd.DataFrame, busy: pd.Series) -> tuple[pd.Series, pd.Series]:
    """Return masks of busy samples with clocks lowered for heat, and for power.

    Either reasons or clocks suffice: a log may lack one of them, and they are read at slightly different moments.
    """
    reasons = rows["throttle_reasons"].fillna(0).astype(int)
    share = _clock_share(rows, busy)
    hot = rows["temperature_c"] >= HOT_C
    at_limit = rows["power_w"] >= _AT_LIMIT_SHARE * rows["power_limit_w"]
    # Clocks lowered by a setting are not throttling.
    slow = busy & (share < _LOW_CLOCK_SHARE) & (reasons & _CLOCK_SETTINGS == 0)
    stretch = (slow != slow.shift()).cumsum()
    slow &= slow.groupby(stretch).transform("size") >= _SUSTAINED_SAMPLES
    thermal = busy & (reasons & THERMAL_REASONS != 0)
    power = busy & (reasons & POWER_REASONS != 0)
    unspecific = busy & (reasons & SLOWDOWN != 0) & ~thermal & ~power
    # A hardware slowdown gives no reason by itself; temperature and power do.
    thermal |= unspecific & hot
    power |= unspecific & ~hot & at_limit
    # Slow clocks without a reason: a GPU at its power limit is warm too, so the limit has precedence over heat.
    slow_by_heat = slow & hot & ~at_limit & ~power
    slow_by_power = slow & at_limit & ~thermal
    # "Not above" in place of "below": if clocks are unknown, the reason counts.
    return thermal | slow_by_heat, (power | slow_by_power) & ~(share > _FULL_CLOCK_SHARE)


def _clock_share(rows: pd.DataFrame, busy: pd.Series) -> pd.Series:
    """Return the SM clock as a share of the GPU's maximum, or of the log's if that is unknown."""
    clock, highest = rows["sm_clock_mhz"], rows["sm_clock_max_mhz"]
    # A high quantile in place of the maximum, since one stray value would make all others look low.
    reference = highest.where(highest > 0) if highest.notna().any() else clock[busy].quantile(0.99)
    return clock / reference


def _spans(times: pd.Series, mask: pd.Series) -> list[tuple[float, float]]:
    """Return start and end of each stretch of ``mask``; an end is the time of the following sample."""
    # Padded with False, so that stretches at the start and end of the log have both edges.
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    ends = np.minimum(edges[1::2], len(times) - 1)
    return list(zip(times.iloc[edges[::2]].tolist(), times.iloc[ends].tolist(), strict=True))


def _notes(rows: pd.DataFrame, worked: bool) -> list[str]:
    notes = []
    if rows["throttle_reasons"].isna().all():
        notes.append("no throttle reasons in the log: throttling is inferred from the clocks")
    if len(rows) < 30:
        notes.append(f"only {counted(len(rows), 'sample{s}')}, so the values are uncertain")
    if not worked and rows["util"].notna().any():
        notes.append("was never used: use it (raise ray.num_workers), or release it (CUDA_VISIBLE_DEVICES)")
    errors = rows["ecc_uncorrected"].dropna()  # counted since the driver was loaded: only growth belongs to this log
    if len(errors) and errors.max() > errors.min():
        when = rows[TIME][errors[errors > errors.iloc[0]].index[0]]
        count = counted(int(errors.max() - errors.min()), "uncorrected memory error{s}")
        notes.append(f"{count}, the first after {when:.0f} s: later results may be wrong")
    return notes


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _mean(values: pd.Series, weights: pd.Series, where: pd.Series) -> float | None:
    """Return the mean over the samples of ``where``, weighted by their duration."""
    known = where & values.notna()
    return float(np.average(values[known], weights=weights[known])) if known.any() else None


def _share(mask: pd.Series, weights: pd.Series, within: pd.Series) -> float:
    """Return the share of the time of ``within``; 0 for one or two samples."""
    return float(weights[mask & within].sum() / weights[within].sum()) if mask.sum() >= _SUSTAINED_SAMPLES else 0.0
