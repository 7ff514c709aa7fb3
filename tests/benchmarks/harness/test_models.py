"""The model of the embedding stages: the peers' embeddings are those of each sequence alone."""

from pathlib import Path

import pytest
import torch
from transformers import EsmForMaskedLM

from esmeray.benchmarks.harness.models import random_network, save_weights
from esmeray.benchmarks.peers.transformers_embedding import TransformersEmbedder, Tuning
from esmeray.benchmarks.programs.training_workload import TOY
from esmeray.dataset.tokens.esm import pack_sequences

SEQUENCES = ["MKTAYIAKQR", "GAVLX", "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ", "M"]


@pytest.fixture(scope="module")
def network() -> EsmForMaskedLM:
    return random_network("esm2_t6_8M", **TOY)


def one_by_one(network: EsmForMaskedLM) -> torch.Tensor:
    """Means of each sequence alone, without padding."""
    means = []
    for sequence in SEQUENCES:
        with torch.inference_mode():
            hidden = network.esm(pack_sequences([sequence]).tokens[None]).last_hidden_state[0]
        means.append(hidden[1:-1].mean(0))
    return torch.stack(means)


@pytest.mark.parametrize("tuning", [Tuning(), Tuning(batch_size=3, sort_by_length=True)])
def test_padded_embeddings_are_those_of_each_sequence_alone(network: EsmForMaskedLM, tmp_path: Path, tuning: Tuning):
    embedded = TransformersEmbedder(save_weights(network, tmp_path), "cpu", tuning)(SEQUENCES)
    torch.testing.assert_close(embedded, one_by_one(network), rtol=1e-4, atol=1e-5)


def test_fair_esm_gets_the_same_weights_and_gives_the_same(network: EsmForMaskedLM):
    pytest.importorskip("esm", reason="fair-esm comes with 'make bench'")
    from esmeray.benchmarks.peers.fair_esm_extract import FairEsmExtract

    torch.testing.assert_close(FairEsmExtract(network, "cpu")(SEQUENCES), one_by_one(network), rtol=1e-4, atol=1e-5)
