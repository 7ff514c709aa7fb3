import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import EsmTokenizer

from benchmarks.harness.inputs import random_network, write_fasta
from benchmarks.programs.trainings import MASK_SHARE, TOY, bits_per_residue
from esmeray.dataset.store.sample import sample_records
from esmeray.dataset.tokens.base import EsmSequenceTokenizer
from esmeray.dataset.tokens.esm import MASK


def test_a_seventh_of_the_residues_is_masked_and_the_loss_is_in_bits(tmp_path: Path):
    fasta = write_fasta(tmp_path / "part.fasta", [sequence for _, sequence in sample_records(30, 6, seed=0)])
    network = random_network("esm2_t6_8M", **TOY).train()
    counts, nats = [], []
    forward = network.forward

    def seen(input_ids: torch.Tensor, attention_mask: torch.Tensor):
        output = forward(input_ids=input_ids, attention_mask=attention_mask)
        masked = input_ids == MASK
        counts.append((int(masked.sum()), int(attention_mask.sum()) - 2 * len(input_ids)))
        nats.append(functional.log_softmax(output.logits[masked], -1))
        return output

    network.forward = seen
    EsmSequenceTokenizer().save(tmp_path)
    tokenizer = EsmTokenizer.from_pretrained(tmp_path)
    bits = [bits_per_residue(network, str(fasta), tokenizer, 510) for _ in range(2)]
    assert bits[0] == bits[1]  # the same masks
    masked, residues = map(sum, zip(*counts, strict=True))
    assert masked / residues == pytest.approx(MASK_SHARE, rel=0.15)  # three standard deviations of 5,000 residues
    entropies = torch.cat(nats)
    assert bits[0] == pytest.approx(float(-entropies.mean()) / math.log(2), rel=0.05)  # random: uniform tokens
