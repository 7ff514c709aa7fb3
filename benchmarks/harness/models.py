"""The same ESM-2 for every contender: random weights from a fixed seed, and our way to embed with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import EsmForMaskedLM, EsmModel

from benchmarks.harness.stage import Device
from model.backbones.esm2 import EsmBackbone
from model.backbones.loading import load_network, quiet_transformers
from model.tasks.embedding import embed, optimize_for_inference
from train_config.schema import BackboneSection

Embedder: TypeAlias = Callable[[Sequence[str]], Tensor]
"""Takes N sequences; gives (N, D) float32, the mean over residues, in the order given."""

SEED = 0
MAX_TOKENS = {"cpu": 2_048, "cuda": 65_536}
"""Budget of our batches; on the CPU a small one stays in the cache."""

_PRODUCT_SIZE, _PRODUCTS = 8192, 20


def random_network(size: str) -> EsmForMaskedLM:
    """ESM-2 of this size in fp32 on the CPU; the same weights each time."""
    return load_network(BackboneSection(source=size), SEED).eval()


def save_weights(network: EsmForMaskedLM, folder: Path) -> Path:
    """Weights and config for ``from_pretrained``."""
    with quiet_transformers():
        network.esm.save_pretrained(folder)
    return folder


def our_embedder(folder: Path, device: str, dtype: torch.dtype, max_tokens: int | None = None) -> Embedder:
    """Packed batches of whole sequences through our backbone."""
    with quiet_transformers():
        model = EsmModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32)
    backbone = optimize_for_inference(EsmBackbone(model, frozen=True).to(device), dtype)
    budget = max_tokens or MAX_TOKENS[device]

    def run(sequences: Sequence[str]) -> Tensor:
        return embed(backbone, sequences, max_tokens=budget).cpu()

    return run


def forward_flops(network: EsmForMaskedLM, sequences: Sequence[str]) -> float:
    """Floating-point operations of one forward pass over these sequences, <cls> and <eos> included, nothing padded.

    Two for each weight of a matrix and token, and 4 L^2 D a layer for the scores and the weighted values of a sequence
    of L tokens: Kaplan et al. 2020 (arXiv:2001.08361), table 1, with Chowdhery et al. 2022 (PaLM, arXiv:2204.02311),
    appendix B; the attention of an encoder is not causal, so none of it is saved. Embeddings, norms, GELU and softmax
    are left out, as is usual.
    """
    layers = network.esm.encoder.layer
    matrices = sum(weight.numel() for weight in layers.parameters() if weight.ndim == 2)
    lengths = [len(sequence) + 2 for sequence in sequences]
    attention = 4 * len(layers) * network.config.hidden_size * sum(length**2 for length in lengths)
    return 2.0 * matrices * sum(lengths) + attention


def matrix_product(device: Device) -> Callable[[], float]:
    """A callable that multiplies large bf16 matrices, the most that the device can do; returns teraFLOPs."""
    matrix = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, device=device, dtype=torch.bfloat16)

    def product() -> float:
        for _ in range(_PRODUCTS):
            torch.matmul(matrix, matrix)
        return _PRODUCTS * 2 * _PRODUCT_SIZE**3 / 1e12

    return product
