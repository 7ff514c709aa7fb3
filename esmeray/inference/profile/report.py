"""Render a profile as text and PNG. Sizes that are out of memory are not plotted."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, NullLocator

from esmeray.common.figure_style import BLUE, GREY, ORANGE, RED, legend, picture, style

_PANELS = (
    ("Latency per sample (ms)", "latency_per_sample_ms", ("p50", "p95", "p99", "mean")),
    ("Throughput (samples/s)", "samples_per_s", ()),
    ("Latency per batch (ms)", "latency_per_batch_ms", ("p50", "p95", "p99", "mean")),
    ("Throughput (tokens/s)", "tokens_per_s", ()),
    ("CPU memory (MB, peak resident)", "cpu_memory_peak_mb", ()),
    ("GPU memory (MB)", "gpu_memory_peak_mb", ()),
)
"""Title, key and lines of each panel. A value without lines is a number."""
_HEATMAP = (
    ("ms per sample, mean", "latency_per_sample_ms", "mean", -1),
    ("ms per sample, p95", "latency_per_sample_ms", "p95", -1),
    ("ms per batch, mean", "latency_per_batch_ms", "mean", -1),
    ("ms per batch, p99", "latency_per_batch_ms", "p99", -1),
    ("samples/s", "samples_per_s", "", 1),
    ("tokens/s", "tokens_per_s", "", 1),
    ("CPU MB, peak", "cpu_memory_peak_mb", "", -1),
    ("GPU MB, peak", "gpu_memory_peak_mb", "", -1),
)
"""Name, key and entry of each heatmap row; 1 if more is better, -1 if less is better."""


def report(profile: Mapping[str, Any]) -> Iterator[str]:
    yield f"{profile['model']} on {profile['device']} in {profile['precision']}, {profile['threads']} threads"
    if "stages" in profile:
        yield from _stage_lines(profile)
    if "batch_sizes" in profile:
        yield from ("", *_batch_lines(profile["batch_sizes"]))
    if "accuracy" in profile:
        whole = profile["accuracy"]
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in whole["metrics"].items())
        speed = f"{whole['seconds']:,.2f} s, {whole['samples_per_s']:,.1f} samples/s"
        yield from ("", f"Whole file of {whole['samples']:,} samples: {metrics} ({speed})")
    if "advice" in profile:
        yield ""
        yield from profile["advice"] or ["The device is the only bottleneck: use a faster device or a smaller model"]


def _stage_lines(profile: Mapping[str, Any]) -> Iterator[str]:
    if "peaks" in profile:
        peaks = profile["peaks"]
        yield (
            f"{profile['residues'] / profile['seconds']:,.0f} residues/s in batches of "
            f"{profile['tokens_of_a_batch']:,} tokens; peaks: {peaks['flops_per_s'] / 1e12:,.3g} TFLOP/s "
            f"({peaks['flops_from']}), {peaks['bytes_per_s'] / 1e9:,.3g} GB/s (measured copy)"
        )
    else:
        yield (
            f"{profile['tokens_per_s']:,.0f} tokens/s in batches of {profile['tokens_of_a_batch']:,}, peak "
            f"memory {profile['peak_memory_bytes'] / 2**30:,.2f} GiB"
        )
    yield from ("", f"{'stage':<20}{'ms a batch':>12}{'share':>9}{'of its limit':>14}")
    for name, stage in profile["stages"].items():
        milliseconds = f"{1e3 * stage['seconds'] / profile['batches']:,.3f}" if "seconds" in stage else ""
        limit = "" if stage.get("share_of_limit") is None else f"{stage['share_of_limit']:.0%}"
        yield f"{name:<20}{milliseconds:>12}{stage['share']:>9.1%}{limit:>14}".rstrip()
    yield from ("", "Operators with the most self time")
    for rank, operator in enumerate(profile["operators"], 1):
        yield (
            f"  {rank}. {operator['name']}: {operator['share']:.1%}, {operator['self_ms']:,.2f} ms in "
            f"{operator['calls']:,} calls"
        )


def _batch_lines(measured: Mapping[str, Any]) -> Iterator[str]:
    rows = measured["rows"]
    done = [row for row in rows if not row["error"]]
    if done:
        # Latency at the smallest batch matters for serving, maximum throughput for embedding.
        fastest = max(done, key=lambda row: row["samples_per_s"])
        smallest = min(done, key=lambda row: row["batch_size"])
        alone = smallest["latency_per_sample_ms"]
        yield (
            f"Latency per sample: {alone['mean']:,.2f} ms, p95 {alone['p95']:,.2f} ms "
            f"(batch size {smallest['batch_size']:,})"
        )
        yield (
            f"Highest throughput: {fastest['samples_per_s']:,.1f} samples/s ({fastest['tokens_per_s']:,.0f} tokens/s) "
            f"at batch size {fastest['batch_size']:,}"
        )
    head = ("batch size", "ms/sample", "p95", "ms/batch", "p95", "p99", "samples/s", "CPU MB", "GPU MB")
    for cells in (head, *map(_cells, rows)):
        yield "  ".join(f"{cell:>10}" for cell in cells).rstrip()


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["error"]:
        return f"{row['batch_size']:,}", row["error"]
    sample, batch = row["latency_per_sample_ms"], row["latency_per_batch_ms"]
    times = [f"{ms:,.2f}" for ms in (sample["mean"], sample["p95"], batch["mean"], batch["p95"], batch["p99"])]
    cpu_mb, gpu_mb = row["cpu_memory_peak_mb"], row["gpu_memory_peak_mb"]
    gpu_memory = "-" if gpu_mb is None else f"{gpu_mb:,.0f}"
    return f"{row['batch_size']:,}", *times, f"{row['samples_per_s']:,.1f}", f"{cpu_mb:,.0f}", gpu_memory


def draw_stages(path: Path, profile: Mapping[str, Any], title: str) -> None:
    """Draw the tokens per second of each stage, as if it ran alone, on a logarithmic scale."""
    rates = {
        name: profile["tokens"] / stage["seconds"] for name, stage in profile["stages"].items() if stage["seconds"]
    }
    with picture(path, 9, 1.2 + 0.3 * len(rates), title) as figure:
        axes = figure.subplots()
        style(axes, "Tokens per second by stage")
        bars = axes.barh(list(rates), list(rates.values()), height=0.66, color=BLUE)
        axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates.values()], padding=3, fontsize=8)
        axes.invert_yaxis()
        # Logarithmic, because stages differ by orders of magnitude, with space for the numbers at the right.
        axes.set(xscale="log", xlim=(min(rates.values()) / 3, max(rates.values()) * 8))


def draw_batches(path: Path, measured: Mapping[str, Any], title: str) -> None:
    """Draw six panels over the batch sizes. Without a GPU the panel of its memory is empty."""
    with picture(path, 13, 7.2, title) as figure:
        done = [row for row in measured["rows"] if not row["error"]]
        sizes = [row["batch_size"] for row in done]
        for axes, (name, key, lines) in zip(figure.subplots(2, 3).ravel(), _PANELS, strict=True):
            style(axes, name)
            for line, colour in zip(lines or ("",), (BLUE, ORANGE, RED, GREY), strict=False):
                heights = _values(done, key, line)
                if None not in heights:  # None for GPU memory without a GPU
                    axes.plot(sizes, heights, color=colour, marker="o", markersize=4, label=line or None)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes)  # the measured sizes instead of powers of two
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.margins(x=0.06, y=0.08)
            # From 0, because otherwise a difference of 2 % would look large.
            axes.set(ylim=(0, None), xlabel="batch size")
            legend(axes)


def _values(rows: Iterable[Mapping[str, Any]], key: str, entry: str) -> list[Any]:
    values = [row[key] for row in rows]
    return [value[entry] for value in values] if entry else values


def draw_heatmap(path: Path, measured: Mapping[str, Any], title: str) -> None:
    """Draw all metrics of all batch sizes as numbers, from red (worst of its row) to green (best)."""
    done = [row for row in measured["rows"] if not row["error"]]
    # Without a GPU its row would be empty.
    lines = [line for line in _HEATMAP if done and done[0][line[1]] is not None]
    values = np.array([_values(done, key, entry) for _, key, entry, _ in lines], float)
    with picture(path, max(7.0, 3.6 + 1.15 * len(done)), 1.6 + 0.46 * max(1, len(lines)), title) as figure:
        axes = figure.subplots()
        if done:
            # Each row has its own scale, because milliseconds and megabytes are not comparable.
            signed = values * np.array([[sign] for *_, sign in lines])
            low, high = signed.min(axis=1, keepdims=True), signed.max(axis=1, keepdims=True)
            goodness = np.divide(signed - low, high - low, out=np.full_like(values, 0.5), where=high > low)
            axes.imshow(goodness, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto", alpha=0.6)
        for (line, column), value in np.ndenumerate(values):
            axes.text(column, line, f"{value:,.0f}" if value >= 1000 else f"{value:.4g}", ha="center", va="center")
        axes.set(xticks=range(len(done)), xticklabels=[f"{row['batch_size']:,}" for row in done])
        axes.set(yticks=range(len(lines)), yticklabels=[name for name, *_ in lines])
        axes.set_xlabel("batch size (green: the best of its line)")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)


def draw_devices(path: Path, models: Sequence[dict[str, Any]]) -> None:
    """Draw residues/s on a logarithmic scale: medians, with whiskers from the lowest to the highest round."""
    names = list(models[0]["devices"])
    with picture(path, 3.0 + 2.0 * len(models), 4.2, f"{names[0]} and {names[1]}, residues/s") as figure:
        axes = figure.subplots()
        style(axes)
        axes.set_yscale("log")
        for offset, name, colour in zip((-0.2, 0.2), names, (BLUE, ORANGE), strict=True):
            rates = np.array([model["devices"][name]["residues_per_s"] for model in models])
            middles = np.median(rates, axis=1)
            reach = middles - rates.min(axis=1), rates.max(axis=1) - middles
            centres = np.arange(len(models)) + offset
            bars = axes.bar(centres, middles, 0.38, yerr=reach, color=colour, capsize=3, label=name)
            axes.bar_label(bars, [f"{middle:,.0f}" for middle in middles], fontsize=8, padding=2)
        axes.set_xticks(
            range(len(models)),
            [f"{Path(model['model']).name}\n{model['speed_up']['value']:.2f} times" for model in models],
        )
        axes.margins(y=0.2)
        legend(axes)
