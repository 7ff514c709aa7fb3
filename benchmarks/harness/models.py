"""The same ESM-2 for every contender: random weights from a fixed seed, and our way to embed with them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import EsmForMaskedLM

from benchmarks.harness.stage import Facts, WrongWorkError
from esmeray.dataset.tokens.model_folder import quiet_transformers
from esmeray.inference.models.model import run
from esmeray.inference.models.opening import open_model
from esmeray.model.backbones.loading import load_network
from esmeray.model.section import BackboneSection
from esmeray.train_config.section import Precision

Embedder: TypeAlias = Callable[[Sequence[str]], Tensor]
"""Takes N sequences; gives (N, D) float32, the mean over residues, in the order given."""

SEED = 0
LEAST_COSINE = 0.999


def random_network(size: str, **changes: int) -> EsmForMaskedLM:
    """ESM-2 of this size, with these changes of its config, in fp32 on the CPU; the same weights each time."""
    return load_network(BackboneSection.model_validate({"source": size, **changes}), SEED).eval()


def save_weights(network: EsmForMaskedLM, folder: Path) -> Path:
    """Weights and config for ``from_pretrained``."""
    with quiet_transformers():
        network.esm.save_pretrained(folder)
    return folder


def our_embedder(folder: Path, device: str, precision: Precision) -> Embedder:
    """The work of an embedding job on its batches."""
    model = open_model(folder, precision, device, heads=[])
    outputs = model.outputs(["mean"])

    def embed(sequences: Sequence[str]) -> Tensor:
        means_ND = torch.empty(len(sequences), model.facts.hidden_size)
        # Batches come in the order of the plan, longest first: rows go back to that of the sequences.
        for batch in run(model, sequences, outputs, model.token_budget(None)):
            means_ND[torch.from_numpy(batch.indices)] = torch.from_numpy(batch.arrays["mean"])
        return means_ND

    return embed


def least_cosines(reference: str, reference_ND: Tensor, others: Mapping[str, Tensor]) -> Facts:
    """The least cosine of each contender's vectors to those of the reference.

    Raises WrongWorkError where it is below :data:`LEAST_COSINE`.
    """
    facts: Facts = {}
    for label, vectors_ND in others.items():
        cosine = float(cosine_similarity(reference_ND.double(), vectors_ND.double()).min())
        if not cosine >= LEAST_COSINE:  # so written, NaN is refused, too
            raise WrongWorkError(f"the embeddings of {label} have a cosine of {cosine:.5f} to {reference}")
        facts[f"least cosine to {reference}, {label}"] = round(cosine, 6)
    return facts
