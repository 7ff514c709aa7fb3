"""Render a profile as text and PNG."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from esmeray.common.figure_style import BLUE, picture, style


def report(profile: Mapping[str, Any]) -> Iterator[str]:
    yield f"{profile['model']} on {profile['device']} in {profile['precision']}, {profile['threads']} threads"
    yield from _stage_lines(profile)
    if "batch_sizes" in profile:
        yield from ("", *_batch_lines(profile["batch_sizes"]))
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


def _batch_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    done = [row for row in rows if not row["error"]]
    if done:
        # Latency at the smallest batch matters for serving, maximum throughput for embedding.
        fastest = max(done, key=itemgetter("samples_per_s"))
        smallest = min(done, key=itemgetter("batch_size"))
        alone = smallest["latency_per_sample_ms"]
        size = f"batch size {smallest['batch_size']:,}"
        yield f"Latency per sample: {alone['mean']:,.2f} ms, p95 {alone['p95']:,.2f} ms ({size})"
        yield (
            f"Highest throughput: {fastest['samples_per_s']:,.1f} samples/s ({fastest['tokens_per_s']:,.0f} tokens/s) "
            f"at batch size {fastest['batch_size']:,}"
        )
    head = ("batch size", "ms/sample", "p95", "ms/batch", "p95", "p99", "samples/s", "CPU MB", "GPU MB")
    for cells in (head, *map(_cells, rows)):
        yield "  ".join(f"{cell:>10}" for cell in cells).rstrip()


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    size = f"{row['batch_size']:,}"
    if row["error"]:
        return size, row["error"]
    sample, batch = row["latency_per_sample_ms"], row["latency_per_batch_ms"]
    times = [f"{ms:,.2f}" for ms in (sample["mean"], sample["p95"], batch["mean"], batch["p95"], batch["p99"])]
    gpu_mb = row["gpu_memory_peak_mb"]
    gpu_memory = "-" if gpu_mb is None else f"{gpu_mb:,.0f}"
    return size, *times, f"{row['samples_per_s']:,.1f}", f"{row['cpu_memory_peak_mb']:,.0f}", gpu_memory


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
