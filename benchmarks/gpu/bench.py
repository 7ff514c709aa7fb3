"""Shared code of the GPU script's parts: arguments, batches, models, timing."""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch

from esmeray.dataset.batches.loader import ResidueSource
from esmeray.dataset.batches.preparation import PreparationSettings
from esmeray.dataset.batches.steps import StepBatches, TrainingSteps
from esmeray.dataset.section import BatchSection, DataSection
from esmeray.dataset.store.conversion import ensure_store
from esmeray.dataset.store.reader import Store
from esmeray.model.section import BackboneSection
from esmeray.monitoring.sampling.peaks import copy_bytes_per_s, product_flops_per_s
from esmeray.tasks.masked_lm.model import MaskedLM
from esmeray.tasks.masked_lm.section import MaskedLMSection
from esmeray.tasks.section import ModelSection

LONGEST = 1024
"""Tokens of the longest sequence."""

SIZES = {
    "tiny": BackboneSection(source="esm2_t6_8M", layers=2, hidden_size=32, heads=4),
    "8M": BackboneSection(source="esm2_t6_8M"),
    "150M": BackboneSection(source="esm2_t30_150M"),
    "650M": BackboneSection(source="esm2_t33_650M"),
    "3B": BackboneSection(source="esm2_t36_3B"),
}
WARM_UPS, MICRO_BATCHES = 3, 4


@dataclass
class Bench:
    """Shared settings of the parts: device, sizes of ESM-2, tokens per batch, backend of torch.compile."""

    device: str
    sizes: tuple[str, ...]
    tokens: int
    backend: str

    @cached_property
    def store(self) -> Store:
        """The embedded sample."""
        # In the system's temporary folder: the machine may have nothing but this checkout.
        return Store(ensure_store(DataSection(), Path(tempfile.gettempdir()) / "esmeray-gpu"))

    @cached_property
    def product_tflops(self) -> float:
        """TFLOP/s of a large bf16 matrix product, the maximum of the device."""
        return 1e-12 * product_flops_per_s(self.device, torch.bfloat16, 8192 if self.device == "cuda" else 256)

    @cached_property
    def copy_tb_per_s(self) -> float:
        """TB/s of a large copy, bytes read and written."""
        # A GiB, far beyond any cache, so that memory is measured.
        source = torch.empty(2**30 if self.device == "cuda" else 2**20, dtype=torch.int8, device=self.device)
        return 2e-12 * copy_bytes_per_s(source, torch.empty_like(source))

    def work(self, tokens: int) -> tuple[StepBatches, float]:
        """Return a step of masked batches of one shape on the device, and the mean number of attended tokens."""
        settings = PreparationSettings(LONGEST - 2, 0, random_crops=True, masking=MaskedLMSection())
        batch = BatchSection(tokens=tokens, global_tokens=MICRO_BATCHES * tokens)
        records = np.arange(len(self.store))
        # One shape for all batches, so that layers are compiled and graphs captured once.
        steps = TrainingSteps(ResidueSource(self.store, settings), records, batch=batch, seed=0, fixed_shapes=True)
        step = next(steps.epoch(0))
        return replace(step, batches=[batch.to(self.device) for batch in step]), steps.mean_context

    def masked_lm(self, name: str, dtype: torch.dtype) -> MaskedLM:
        """Return a masked language model on the device."""
        # A copy, since the parts cast, compile and train it.
        return copy.deepcopy(_initialised(name)).to(self.device, dtype)

    def share_of_peak(self, flops: float, taken_s: float) -> float:
        """Return model FLOP/s as a fraction of a large product's (MFU relative to what the card reaches)."""
        return flops / taken_s / 1e12 / self.product_tflops


@cache
def _initialised(name: str) -> MaskedLM:
    """Return a masked language model on the CPU; weights are initialised once per size."""
    return MaskedLM.build(ModelSection(task="masked_lm", backbone=SIZES[name]), seed=0)


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """Return the work as a CUDA graph, which the device replays on the same tensors without the host."""
    # Warmed up on a stream of its own, as torch requires, so that one-time set-up is not captured.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
