"""The same proteins embedded on the CPU and on the GPU: speed in turns, and how well the vectors agree.

In: a model and a store. Out: plain values, and bars of several models. Without a GPU the CPU's fp32 and bf16 are
compared in the same form.

Shape legend: N proteins, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.figure_style import BLUE, ORANGE, legend, new_figure, save, style
from common.timing import measure, ratio, round_ratios
from dataset.store.reader import Store
from inference.embedding.plan import make_plan
from inference.embedding.worker import open_worker
from train_config.embed_schema import EmbedSection


def compare_devices(
    source: str,
    store: Store,
    settings: EmbedSection,
    show: Callable[[str], None],
    *,
    proteins: int,
    rounds: int,
    random_weights: bool,
) -> dict[str, Any]:
    """Embed so many proteins, spread over the lengths, on both devices, a round each in turns after a warm-up."""
    kinds = [("cpu", settings), ("cuda", settings)]
    if not torch.cuda.is_available():
        kinds = [("cpu", settings.model_copy(update={"precision": precision})) for precision in ("fp32", "bf16")]
    contenders, devices = {}, {}
    for device, asked in kinds:
        resolved = asked.resolved(device == "cuda")
        worker = open_worker(source, resolved, device, store, random_weights)
        shard = make_plan(store, resolved, worker.facts.longest).spread(proteins)
        worker.compute(shard.part(shard.batches()[0]))
        name = f"{'GPU' if device == 'cuda' else 'CPU'} {resolved.precision}"
        contenders[name] = partial(worker.compute, shard)
        devices[name] = {"device": worker.facts.device_name, "batch_tokens": shard.budget}
    samples = measure(contenders, rounds, show=lambda text: show(f"{source}, {text}")).samples
    residues = int(shard.lengths.sum())
    count = shard.records.size
    seconds = {name: [row.seconds for _, row in runs] for name, runs in samples.items()}
    for name, each in seconds.items():
        devices[name]["proteins_per_s"] = [count / run_s for run_s in each]
        devices[name]["residues_per_s"] = [residues / run_s for run_s in each]
    slower, faster = seconds.values()
    return {
        "model": source,
        "random_weights": random_weights,
        "proteins": count,
        "residues": residues,
        "devices": devices,
        "speed_up": ratio(round_ratios(slower, faster))._asdict(),
        "hours_saved_per_million_proteins": 1e6 / count * (median(slower) - median(faster)) / 3600,
        "agreement": agreement(*(runs[0][0]["mean"]["values"] for runs in samples.values())),
    }


def agreement(first_ND: NDArray[np.float32], second_ND: NDArray[np.float32]) -> dict[str, float]:
    """Cosine of each protein's two vectors, and the norm of their difference over that of the first."""
    norms_N = np.linalg.norm(first_ND, axis=1)
    cosines_N = (first_ND * second_ND).sum(axis=1) / (norms_N * np.linalg.norm(second_ND, axis=1))
    return {
        "lowest_cosine": float(cosines_N.min()),
        "mean_cosine": float(cosines_N.mean()),
        "largest_relative_difference": float((np.linalg.norm(first_ND - second_ND, axis=1) / norms_N).max()),
    }


def draw_comparison(path: Path, models: Sequence[dict[str, Any]]) -> None:
    """Residues/s on a logarithmic scale: medians, with whiskers from the lowest to the highest round."""
    names = list(models[0]["devices"])
    figure = new_figure(3.0 + 2.0 * len(models), 4.2, f"Embeddings: {names[0]} beside {names[1]}, residues/s")
    axes = figure.subplots()
    style(axes)
    axes.set_yscale("log")
    for offset, name, colour in zip((-0.2, 0.2), names, (BLUE, ORANGE), strict=True):
        rates = np.array([model["devices"][name]["residues_per_s"] for model in models])
        middles = np.median(rates, axis=1)
        reach = middles - rates.min(axis=1), rates.max(axis=1) - middles
        places = np.arange(len(models)) + offset
        bars = axes.bar(places, middles, 0.38, yerr=reach, color=colour, capsize=3, label=name)
        axes.bar_label(bars, [f"{middle:,.0f}" for middle in middles], fontsize=8, padding=2)
    labels = [f"{Path(model['model']).name}\n{model['speed_up']['value']:.2f} times" for model in models]
    axes.set_xticks(range(len(models)), labels)
    axes.margins(y=0.2)
    legend(axes)
    save(figure, path)
