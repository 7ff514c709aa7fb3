"""A multi-label network from embeddings to terms.

In: vectors of proteins, and their terms as a sparse matrix, of which a batch alone is ever dense. Out: a network with
the smallest validation loss, probabilities, a file. The loss is binary cross-entropy; a term weighs 1 plus its
information accretion in bits, so that those that its parents imply are learnt, too.

It has a loop of its own: the classifier's trainer starts Ray and DeepSpeed, for a network that trains in a minute on a
processor.

Shape legend: N proteins, B of a batch, C channels, K terms that are learnt, V terms of an aspect.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save
from scipy.sparse import csr_array
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, gelu

from common.publishing import write_atomically
from function.predictors import pruned
from train_config.function_schema import NetworkSection


class TermNetwork(nn.Module):
    """Standardised vectors (B, C), a hidden layer, logits (B, K).

    Attributes:
        mean, std: (C,) of the training vectors.
        places: (K,) int64 places of the terms in their aspect.
    """

    mean: Tensor
    std: Tensor
    places: Tensor

    def __init__(self, channels: int, hidden: int, terms: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))
        self.register_buffer("places", torch.zeros(terms, dtype=torch.int64))
        self.hidden, self.dropout = nn.Linear(channels, hidden), nn.Dropout(dropout)
        self.output = nn.Linear(hidden, terms)

    def forward(self, vectors_BC: Tensor) -> Tensor:
        """(B, K) logits."""
        hidden_BD = gelu(self.hidden((vectors_BC - self.mean) / self.std))
        logits_BK: Tensor = self.output(self.dropout(hidden_BD))
        return logits_BK


def train_network(
    vectors_NC: NDArray[np.float32],
    terms: csr_array,
    places_K: NDArray[np.int64],
    training_N: NDArray[np.bool_],
    accretion_V: NDArray[np.float64],
    settings: NetworkSection,
    seed: int,
    show: Callable[[str], None] = lambda text: None,
) -> TermNetwork:
    """Train on the proteins of ``training_N`` until the loss of the others grows.

    ``terms`` is (N, V) bool. Equal arguments give equal weights on the same processor and number of threads.
    """
    targets = csr_array(terms[:, places_K])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = TermNetwork(vectors_NC.shape[1], settings.hidden_size, places_K.size, settings.dropout)
        network.places.copy_(torch.from_numpy(places_K))
        known_NC = torch.from_numpy(vectors_NC[training_N])
        network.mean.copy_(known_NC.mean(0))
        network.std.copy_(known_NC.std(0, correction=0).clamp(min=1e-6))
        share_K = torch.from_numpy((targets[training_N].sum(axis=0) + 1) / (training_N.sum() + 2))
        nn.init.zeros_(network.output.weight)
        network.output.bias.data.copy_(torch.logit(share_K))
        weights_K = torch.from_numpy(1 + accretion_V[places_K]).float()
        return _fitted(network, vectors_NC, targets, training_N, weights_K / weights_K.mean(), settings, show)


def _fitted(
    network: TermNetwork,
    vectors_NC: NDArray[np.float32],
    targets: csr_array,
    training_N: NDArray[np.bool_],
    weights_K: Tensor,
    settings: NetworkSection,
    show: Callable[[str], None],
) -> TermNetwork:
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate)
    training, validation = np.flatnonzero(training_N), np.flatnonzero(~training_N)

    def loss_of(proteins: NDArray[np.int64]) -> Tensor:
        logits_BK = network(torch.from_numpy(vectors_NC[proteins]))
        targets_BK = torch.from_numpy(targets[proteins].toarray()).float()
        return binary_cross_entropy_with_logits(logits_BK, targets_BK, weight=weights_K)

    def batches(proteins: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        return np.array_split(proteins, max(1, -(-proteins.size // settings.batch_size)))

    best, best_state, best_epoch = np.inf, copy.deepcopy(network.state_dict()), 0
    for epoch in range(1, settings.epochs + 1):
        network.train()
        for proteins in batches(training[torch.randperm(training.size).numpy()]):
            loss = loss_of(proteins)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        network.eval()
        with torch.inference_mode():
            parts = batches(validation)
            value = sum(float(loss_of(part)) * part.size for part in parts if part.size) / max(1, validation.size)
        show(f"epoch {epoch}, validation loss {value:.5f}")
        if value < best or not validation.size:
            best, best_state, best_epoch = value, copy.deepcopy(network.state_dict()), epoch
        elif epoch - best_epoch >= settings.patience:
            break
    network.load_state_dict(best_state)
    return network.eval()


@torch.inference_mode()
def probabilities(network: TermNetwork, vectors_NC: NDArray[np.float32], terms: int) -> csr_array:
    """(N, V) probabilities, not propagated, of an aspect of V ``terms``; 0 for those that are not learnt."""
    found = pruned(csr_array(network(torch.from_numpy(vectors_NC)).sigmoid().double().numpy()))
    columns = network.places.numpy()[found.indices]
    return csr_array((found.data, columns, found.indptr), shape=(len(vectors_NC), terms))


def save_network(network: TermNetwork, path: Path) -> None:
    """Write weights and places of terms as safetensors, whole or not at all."""
    write_atomically(path, save(network.state_dict()))


def load_network(path: Path) -> TermNetwork:
    """A network that :func:`save_network` wrote."""
    tensors = load_file(path)
    network = TermNetwork(tensors["mean"].numel(), tensors["hidden.bias"].numel(), tensors["places"].numel())
    network.load_state_dict(tensors)
    return network.eval()
