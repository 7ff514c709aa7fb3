"""ESM-2 whose layers are read from the disk while they compute, or are of 8 bits, beside the same model in memory.

Random weights in bf16, written layer by layer, so that no process ever holds them all but the one that is measured. The
same proteins, batches and precision (the machine's default), each contender in a process of its own, from which the
files are out of the page cache. Rates are those of the batches, opening the model left out; memory is the peak of the
process by the kernel's count (VmHWM), from its start to its end, libraries and opening included. The vectors of both
must be equal, byte for byte, as must those of 8 bits, streamed and in memory; the cosines of these with the others' are
reported beside the rates. Where the disk has room, 15B is streamed beside the products of its layers alone.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.harness.proteins import read_proteins
from benchmarks.harness.stage import Case, Comparison, Contender, Facts, Setting, Stage, WrongWorkError
from benchmarks.programs.processes import MemoryMeter, call
from esmeray.common.remote import Storage, use
from esmeray.inference.models.model import run
from esmeray.inference.models.opening import open_model
from esmeray.model.backbones.loading import build_backbone
from esmeray.model.device import DTYPES
from esmeray.model.section import BackboneSection
from esmeray.train_config.section import ComputeSection

STREAMED = "layers streamed"
RESIDENT = "layers in memory"
STREAMED_INT8 = "8 bits, streamed"
RESIDENT_INT8 = "8 bits, in memory"
LAYERS: dict[str, dict[str, Any]] = {
    STREAMED: {"stream": True, "weights": "stored"},
    RESIDENT: {"stream": False, "weights": "stored"},
    STREAMED_INT8: {"stream": True, "weights": "int8"},
    RESIDENT_INT8: {"stream": False, "weights": "int8"},
}
"""Settings of each contender."""
PRODUCTS = "its products alone"
RATE = "ESM-2 3B"
MEMORY = "peak memory, ESM-2 3B"
LARGE_RATE = "ESM-2 15B"
LARGE_DISK_BYTES = 35e9
"""Bytes on disk of the weights of 15B, with a reserve."""
PIECES = 8
RESIDUES = 510
"""Two full batches, as those of a job are: two cores without bf16 take three minutes for them, with 15B fifteen."""


def _cases(setting: Setting) -> Iterator[Case]:
    residues = "".join(read_proteins(setting.fasta).sequences)
    sequences = [residues[start : start + RESIDUES] for start in range(0, PIECES * RESIDUES, RESIDUES)]
    setting.note("writing weights")
    shared: dict[str, Any] = {"sequences": sequences, "device": setting.device}
    shared["folder"] = str(write_weights(setting.folder / "model", "esm2_t6_8M" if setting.quick else "esm2_t36_3B"))
    shared["precision"] = ComputeSection().resolved(setting.device == "cuda").precision
    measured: dict[str, dict[str, Any]] = {}

    def measure(name: str) -> float:
        measured[name] = call(f"{__name__}:embed", layers=LAYERS[name], **shared)
        same = [other for other in measured if LAYERS[other]["weights"] == LAYERS[name]["weights"]]
        if any(measured[other]["vectors"] != measured[name]["vectors"] for other in same):
            raise WrongWorkError("vectors differ")
        return measured[name]["tokens"] / measured[name]["seconds"]

    facts = {"precision": shared["precision"], "residues": sum(map(len, sequences))}
    all_layers = tuple(Contender(name, partial(measure, name), "value") for name in LAYERS)
    yield Case(RATE, "tokens/s", all_layers, rounds=1, facts=facts)  # a round takes minutes
    cosines = agreement(*(measured[name]["vectors"] for name in (RESIDENT, RESIDENT_INT8)))
    facts |= {"least cosine of 8 bits": min(cosines), "mean cosine of 8 bits": sum(cosines) / len(cosines)}
    peaks = {name: own["peak_bytes"] / 1e6 for name, own in measured.items()}
    all_layers = tuple(Contender(name, partial(peaks.__getitem__, name), "value") for name in peaks)
    facts |= {f"CPU seconds, {name}": own["cpu_s"] for name, own in measured.items()}
    yield Case(MEMORY, "MB", all_layers, better="lower", rounds=1, facts=facts)
    if not setting.quick and shutil.disk_usage(setting.folder).free > LARGE_DISK_BYTES:
        yield from _large_cases(setting, sequences, shared["precision"])


def _large_cases(setting: Setting, sequences: list[str], precision: str) -> Iterator[Case]:
    """Of 15B, which most memories can't hold, beside its products, of one layer's weights again and again."""
    setting.note("writing weights of 15B")
    shared = {"device": setting.device, "precision": precision, "sequences": sequences}
    shared["folder"] = str(write_weights(setting.folder / "large", "esm2_t48_15B"))
    measured: dict[str, Any] = {}

    def streamed() -> float:
        measured.update(call(f"{__name__}:embed", layers=LAYERS[STREAMED], **shared))
        return measured["tokens"] / measured["seconds"]

    def alone() -> float:
        products = call(f"{__name__}:multiply", **shared)
        return products["tokens"] / products["seconds"]

    facts: Facts = {"precision": precision, "residues": sum(map(len, sequences))}
    both = (Contender(STREAMED, streamed, "value"), Contender(PRODUCTS, alone, "value"))
    yield Case(LARGE_RATE, "tokens/s", both, rounds=1, facts=facts)
    facts |= {"CPU seconds": measured["cpu_s"], "batches": measured["batches"]}
    peak = (Contender(STREAMED, lambda: measured["peak_bytes"] / 1e6, "value"),)
    yield Case("peak memory, ESM-2 15B", "MB", peak, better="lower", rounds=1, facts=facts)


def multiply(folder: str, sequences: list[str], precision: Any, device: str) -> dict[str, Any]:
    """Measure the linear layers on as many tokens, without attention, norms and weights to be read."""
    config = json.loads((Path(folder) / "config.json").read_text())
    hidden, inner, layers = (config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    dtype = DTYPES[precision]
    linears = [nn.Linear(hidden, hidden, device=device, dtype=dtype) for _ in range(4)]
    linears += [nn.Linear(*shape, device=device, dtype=dtype) for shape in ((hidden, inner), (inner, hidden))]
    tokens = sum(map(len, sequences)) + 2 * len(sequences)
    inputs = {width: torch.randn(tokens, width, device=device, dtype=dtype) for width in (hidden, inner)}
    rounds_s = []
    with torch.inference_mode():
        for _ in range(4):
            start_s = time.perf_counter()
            for linear in linears:
                linear(inputs[linear.in_features]).sum().item()  # until it is computed
            rounds_s.append(layers * (time.perf_counter() - start_s))
    return {"tokens": tokens, "seconds": median(rounds_s[1:])}


def write_weights(folder: Path, size: str) -> Path:
    """Random weights in bf16 as transformers has them, a file for each layer."""
    folder.mkdir()
    network = build_backbone(BackboneSection(source=size), 0, empty=True).model
    (folder / "config.json").write_text(json.dumps(network.config.to_dict()))
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    # Drawn once, which for all weights would take minutes: each tensor starts a value further on.
    noise = 0.02 * torch.randn(len(shapes) + max(map(math.prod, shapes.values()))).bfloat16()
    layers = {name: name.partition("encoder.layer.")[2].partition(".")[0] for name in shapes}
    files = {name: f"model-{layer or 'embeddings'}.safetensors" for name, layer in layers.items()}
    for file in set(files.values()):
        tensors = {
            name: noise[start : start + math.prod(shape)].view(shape).clone()
            for start, (name, shape) in enumerate(shapes.items())
            if files[name] == file
        }
        save_file(tensors, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def agreement(vectors_NC: list[list[float]], others_NC: list[list[float]]) -> list[float]:
    """Cosines of vectors of proteins with others of the same ones."""
    pairs = zip(vectors_NC, others_NC, strict=True)
    return [float(np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other)) for one, other in pairs]


def embed(folder: str, sequences: list[str], precision: Any, device: str, layers: dict[str, Any]) -> dict[str, Any]:
    """Vectors of the proteins, and what they take, in the process that is measured."""
    meter = MemoryMeter()
    cache = Path(folder).with_name("cache")
    use(Storage(cache_folder=str(cache)))  # of the copy of 8 bits
    os.sync()  # what is not on the disk yet can't leave the page cache
    for path in [*Path(folder).iterdir(), *cache.rglob("*.safetensors")]:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    model = open_model(folder, precision, device, heads=[], **layers)
    start_s = time.perf_counter()
    start_cpu_s = time.process_time()
    batches = [*run(model, sequences, model.outputs(["mean"]), model.token_budget(None))]
    return {
        "seconds": time.perf_counter() - start_s,
        "cpu_s": time.process_time() - start_cpu_s,
        "tokens": sum(int(batch.lengths.sum()) + 2 * len(batch.lengths) for batch in batches),
        "vectors": [row for batch in batches for row in batch.arrays["mean"].tolist()],
        "batches": len(batches),
        "peak_bytes": meter.peak().total_bytes,
    }


STAGE = Stage(
    name="streaming",
    summary="ESM-2 3B whose layers are read while they compute, or are of 8 bits, beside the same model in memory",
    cases=_cases,
    comparisons=(
        Comparison(RATE, STREAMED, RESIDENT, {"cpu": 0.9}),
        Comparison(RATE, RESIDENT_INT8, RESIDENT),
        Comparison(MEMORY, STREAMED, RESIDENT, {"cpu": 4.0}),
        Comparison(MEMORY, RESIDENT_INT8, RESIDENT),
        Comparison(LARGE_RATE, STREAMED, PRODUCTS, {"cpu": 0.85}),
    ),
)
