"""Measure contenders in turns, and compare ours with each of the others.

Everything is a ratio, larger if ours is better. A floor is the smallest ratio that the project wants to reach on a CPU.
A contender is a function that returns one measured value; its stage warms it up.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any, Literal

from benchmarks.harness.runner import shown
from benchmarks.harness.stage import Row, Setting
from esmeray.common import timing


def compare(
    setting: Setting,
    case: str,
    unit: str,
    contenders: Mapping[str, Callable[[], float]],
    floors: Mapping[str, float | None] | None = None,
    better: Literal["higher", "lower"] = "higher",
    rounds: int = 3,
) -> Iterator[Row]:
    """Yield a row for each contender but the first, which is ours."""
    # In turns, so that whatever disturbs the machine disturbs all of them.
    samples = timing.measure(contenders, 1 if setting.quick else rounds, setting.note)
    setting.samples[case] = samples
    ours, *peers = contenders
    for peer in peers:
        # The ratio is taken per round: a disturbance of a round is in both sides.
        ratio = timing.ratio(timing.round_ratios(samples[ours], samples[peer], better))
        floor = (floors or {}).get(peer) if setting.device == "cpu" else None
        yield {
            "case": case,
            "ours": f"{ours}: {shown(median(samples[ours]))} {unit}",
            "peer": f"{peer}: {shown(median(samples[peer]))} {unit}",
            "ratio": ratio.value,
            "low": ratio.low,
            "high": ratio.high,
            "floor": floor,
            "reached": verdict(ratio, floor),
        }


def compare_runs(
    setting: Setting, case: str, unit: str, runs: Mapping[str, Callable[[], tuple[float, float]]], **options: Any
) -> Iterator[Row]:
    """Compare runs that return a value and their peak memory in MB; ``options`` as in :func:`compare`."""
    peaks_mb: dict[str, list[float]] = {name: [] for name in runs}

    def measured(name: str) -> float:
        value, peak_mb = runs[name]()
        peaks_mb[name].append(peak_mb)
        return value

    yield from compare(setting, case, unit, {name: partial(measured, name) for name in runs}, **options)
    # The memory of the same runs, one value per round.
    memory = {name: iter(values).__next__ for name, values in peaks_mb.items()}
    rounds = min(map(len, peaks_mb.values()))
    yield from compare(setting, f"peak memory, {case}", "MB", memory, better="lower", rounds=rounds)


def verdict(ratio: timing.Ratio, floor: float | None) -> str | None:
    """Compare a ratio with the floor; within noise if its interval contains the floor."""
    if floor is None:
        return None
    noise = ", within noise" if ratio.low < floor <= ratio.high else ""
    return f"yes{noise}" if ratio.value >= floor else f"no{noise}"
