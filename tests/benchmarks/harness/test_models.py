"""The model of the embedding stages: a peer embeds a sequence in a batch as it embeds it alone."""

from pathlib import Path

import torch

from benchmarks.harness.inputs import random_network
from benchmarks.peers.transformers_embedding import TransformersEmbedder, Tuning, write_model
from benchmarks.programs.trainings import TOY
from esmeray.dataset.tokens.esm import pack_sequences

SEQUENCES = ["MKTAYIAKQR", "GAVLX", "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ", "M"]


@torch.inference_mode()
def test_padded_embeddings_are_those_of_each_sequence_alone(tmp_path: Path):
    network = random_network("esm2_t6_8M", **TOY)
    tokens = [pack_sequences([sequence]).tokens for sequence in SEQUENCES]
    alone = torch.stack([network.esm(ids[None]).last_hidden_state[0, 1:-1].mean(0) for ids in tokens])
    folder = write_model(tmp_path, "esm2_t6_8M", **TOY)
    for tuning in (Tuning(), Tuning(batch_size=3, sort_by_length=True)):
        embedded = TransformersEmbedder(folder, "cpu", tuning)(SEQUENCES)
        torch.testing.assert_close(embedded, alone, rtol=1e-4, atol=1e-5)
