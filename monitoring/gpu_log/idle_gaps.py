"""What a GPU waited for in the gaps between its work.

In: the traces of all GPUs of a machine, and when each worked. Out: the gaps of one of them, sorted by likely cause:

checkpoint   the machine writes to its disk or network meanwhile, far above its usual
sync         other GPUs work meanwhile, and have gaps of their own while this one works
loader       short and many, and the CPUs are busier than else (or nearly full), or the disk is read far above its usual
periodic     as regular as a clock, and nothing else is to be seen: a checkpoint or a validation, most likely
unknown      none of these

A log without the machine's figures (nvidia-smi's) leaves their pattern to judge by, and the cause is said to be so.

Shape legend: S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from monitoring.gpu_log.busy_time import BusyTime, Floats, Mask, Span
from monitoring.gpu_log.reader import Trace

Cause = Literal["checkpoint", "sync", "loader", "periodic", "unknown"]

MANY = 5
"""From so many gaps on they are a habit."""
SHORT_S = 15.0
SHORT_SAMPLES = 5
"""What is shorter than either is short."""
_RISE = 3.0
"""Times above the 95th percentile of busy moments that counts as far above the usual."""
_LEAST_BYTES_PER_S = 10e6
"""Less disk or network traffic than this explains no gap."""
_CPU_FULL_PERCENT = 70.0
_CPU_RISE_PERCENT = 10.0
_OTHERS_BUSY_SHARE = 0.7
_REGULAR_SPREAD = 0.2
"""Spread of the distances between gaps, relative to them, under which they are periodic."""
_LEAST_REGULAR = 4
"""Gaps from which regularity can be told."""


@dataclass(frozen=True)
class GapGroup:
    """Gaps of one cause.

    Attributes:
        cause: the likeliest.
        gaps: in order of time.
        lost_s: seconds in them.
        usual_s: their median length.
        every_s: median distance from start to start; None of a single one.
        regular: whether that distance hardly varies.
        evidence: what speaks for the cause, in words.
        by_pattern: there was nothing but their pattern to judge by.
    """

    cause: Cause
    gaps: tuple[Span, ...]
    lost_s: float
    usual_s: float
    every_s: float | None
    regular: bool
    evidence: str
    by_pattern: bool = False


def group_gaps(trace: Trace, busy_time: BusyTime, others: Sequence[tuple[Trace, BusyTime]]) -> list[GapGroup]:
    """The gaps of one GPU by cause.

    Args:
        trace: its samples.
        busy_time: when it worked.
        others: the other GPUs of its machine.
    """
    context = _Context(trace, busy_time, others)
    rest, groups = list(busy_time.gaps), []
    for cause, find in (("checkpoint", context.writing), ("sync", context.alternating)):
        found, evidence = find(rest)
        if found:
            groups.append(context.group(cause, found, evidence))  # type: ignore[arg-type]
            told = set(found)
            rest = [gap for gap in rest if gap not in told]
    if rest:
        groups += context.judge_rest(rest)
    return groups


def is_short(seconds: float, interval_s: float) -> bool:
    """Whether a gap is over soon."""
    return seconds < max(SHORT_S, SHORT_SAMPLES * interval_s)


class _Context:
    """One GPU, its machine and its neighbours."""

    def __init__(self, trace: Trace, busy_time: BusyTime, others: Sequence[tuple[Trace, BusyTime]]) -> None:
        self._trace = trace
        self._busy = busy_time
        self._others = others
        self._quiet = _far_from(busy_time.gaps, busy_time.steady)

    def writing(self, gaps: Sequence[Span]) -> tuple[list[Span], str]:
        """Those in which the machine writes to disk or sends far above its usual."""
        found: list[Span] = []
        for name in ("disk_write_bytes_per_s", "net_sent_bytes_per_s"):
            rates = self._trace.get(name)
            limit = self._far_above(rates)
            chosen = [gap for gap in gaps if _largest(rates, self._around(gap)) > limit]
            if len(chosen) > len(found):
                found = chosen
                peak = float(np.median([_largest(rates, self._around(gap)) for gap in found]))
                what = "written to disk" if name.startswith("disk") else "sent over the network"
                evidence = f"{_rate(peak)} {what} meanwhile, {_rate(self._usual(rates))} else"
        return (found, evidence) if found else ([], "")

    def alternating(self, gaps: Sequence[Span]) -> tuple[list[Span], str]:
        """Those in which another GPU works that for its part waits while this one works."""
        partners = [other for other in self._others if self._waits_for(other)]
        if not partners:
            return [], ""
        working = np.any([self._busy_at(other) for other in partners], axis=0)
        found = [gap for gap in gaps if working[gap.samples].mean() >= _OTHERS_BUSY_SHARE]
        names = ", ".join(trace.gpu for trace, _ in partners)
        return (
            (found, f"GPU {names} works meanwhile, and waits while this one works") if len(found) >= MANY else ([], "")
        )

    def judge_rest(self, gaps: list[Span]) -> list[GapGroup]:
        """Short ones may be the loader's; others are periodic or unknown."""
        seconds = {gap: self._busy.seconds(gap) for gap in gaps}
        short = [gap for gap in gaps if is_short(seconds[gap], self._busy.interval_s)]
        brief = set(short)
        long = [gap for gap in gaps if gap not in brief]
        groups = []
        if short:
            cause, evidence, by_pattern = self._of_short(short)
            groups.append(self.group(cause, short, evidence, by_pattern))
        if long:
            cause = "periodic" if self._regular(long) else "unknown"
            groups.append(self.group(cause, long, "" if self._host_known() else _NO_HOST, not self._host_known()))
        return groups

    def group(self, cause: Cause, gaps: Sequence[Span], evidence: str, by_pattern: bool = False) -> GapGroup:
        """Their figures."""
        seconds = [self._busy.seconds(gap) for gap in gaps]
        distances = self._distances(gaps)
        every_s = float(np.median(distances)) if len(distances) else None
        return GapGroup(
            cause,
            tuple(gaps),
            sum(seconds),
            float(np.median(seconds)),
            every_s,
            self._regular(gaps),
            evidence,
            by_pattern,
        )

    def _of_short(self, gaps: Sequence[Span]) -> tuple[Cause, str, bool]:
        if not self._host_known():
            if self._regular(gaps) and self._sparse(gaps):
                return "periodic", _NO_HOST, True
            return ("loader" if len(gaps) >= MANY else "unknown"), _NO_HOST, True
        inside, outside = self._means("cpu_percent", gaps)
        fuller = inside - outside >= _CPU_RISE_PERCENT
        if len(gaps) >= MANY and (fuller or inside >= _CPU_FULL_PERCENT):
            return "loader", f"CPUs {inside:.0f} % busy meanwhile, {outside:.0f} % else", False
        reads = self._trace.get("disk_read_bytes_per_s")
        limit = self._far_above(reads)
        reading = [gap for gap in gaps if _largest(reads, self._around(gap)) > limit]
        if len(gaps) >= MANY and len(reading) > len(gaps) / 2:
            inside, outside = self._means("disk_read_bytes_per_s", gaps)
            return "loader", f"{_rate(inside)} read from disk meanwhile, {_rate(outside)} else", False
        cpu = f"CPUs {inside:.0f} % busy meanwhile, {outside:.0f} % else" if inside == inside else ""
        return ("periodic" if self._regular(gaps) and self._sparse(gaps) else "unknown"), cpu, False

    def _host_known(self) -> bool:
        return self._trace.has("cpu_percent")

    def _means(self, name: str, gaps: Sequence[Span]) -> tuple[float, float]:
        """A figure within the gaps, and while the GPU works away from them."""
        values = self._trace.get(name)
        inside = np.zeros(len(values), bool)
        for gap in gaps:
            inside[gap.samples] = True
        return _mean(values[inside]), _mean(values[self._quiet])

    def _around(self, gap: Span) -> slice:
        """A gap with its neighbours: the machine's rates are means over the interval before a sample."""
        return slice(max(0, gap.first - 1), gap.last + 2)

    def _usual(self, rates: Floats) -> float:
        quiet = rates[self._quiet]
        quiet = quiet[np.isfinite(quiet)]
        return float(np.median(quiet)) if len(quiet) else 0.0

    def _far_above(self, rates: Floats) -> float:
        quiet = rates[self._quiet]
        quiet = quiet[np.isfinite(quiet)]
        return max(_LEAST_BYTES_PER_S, _RISE * float(np.percentile(quiet, 95)) if len(quiet) else 0.0)

    def _busy_at(self, other: tuple[Trace, BusyTime]) -> Mask:
        """(S,) whether another GPU works at this one's moments: its nearest sample says."""
        trace, busy_time = other
        places = np.clip(np.searchsorted(trace.time_s, self._trace.time_s), 1, max(1, len(trace.time_s) - 1))
        later = np.abs(trace.time_s[np.minimum(places, len(trace.time_s) - 1)] - self._trace.time_s)
        earlier = np.abs(trace.time_s[places - 1] - self._trace.time_s)
        return busy_time.busy[np.where(later < earlier, np.minimum(places, len(trace.time_s) - 1), places - 1)]

    def _waits_for(self, other: tuple[Trace, BusyTime]) -> bool:
        """Whether the other GPU has many gaps while this one works."""
        trace, busy_time = other
        mine = _Context(trace, busy_time, ())._busy_at((self._trace, self._busy))
        waits = [gap for gap in busy_time.gaps if mine[gap.samples].mean() >= _OTHERS_BUSY_SHARE]
        return len(waits) >= MANY

    def _distances(self, gaps: Sequence[Span]) -> Floats:
        return np.diff(self._trace.time_s[[gap.first for gap in gaps]])

    def _regular(self, gaps: Sequence[Span]) -> bool:
        distances = self._distances(gaps)
        if len(gaps) < _LEAST_REGULAR:
            return False
        middle = float(np.median(distances))
        # The median absolute deviation: one that is missing makes one long distance, not an irregular series.
        spread = 1.4826 * float(np.median(np.abs(distances - middle)))
        return spread <= max(_REGULAR_SPREAD * middle, 0.5 * self._busy.interval_s)

    def _sparse(self, gaps: Sequence[Span]) -> bool:
        """Whether there is much work between them; a loader's come thick and fast."""
        return float(np.median(self._distances(gaps))) >= 20 * self._busy.interval_s


_NO_HOST = "judged by their pattern alone: the log has no CPU and disk figures"


def _far_from(gaps: Sequence[Span], busy: Mask) -> Mask:
    """(S,) busy samples that are no neighbours of a gap; all busy ones where too few are left."""
    far = busy.copy()
    for gap in gaps:
        far[max(0, gap.first - 2) : gap.last + 3] = False
    return far if far.sum() >= 10 else busy


def _largest(values: Floats, where: slice) -> float:
    known = values[where][np.isfinite(values[where])]
    return float(known.max()) if len(known) else 0.0


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s"
