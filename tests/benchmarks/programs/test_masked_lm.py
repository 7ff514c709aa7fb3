import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from benchmarks.harness.models import random_network
from benchmarks.harness.proteins import write_fasta
from benchmarks.programs.masked_lm import MASK_SHARE, Evaluation
from benchmarks.programs.training_workload import TOY
from esmeray.dataset.store.sample import sample_records
from esmeray.dataset.tokens.esm import MASK


def test_a_model_is_asked_for_a_seventh_of_the_residues_each_behind_a_mask_and_answers_in_bits(tmp_path: Path):
    fasta = tmp_path / "part.fasta"
    write_fasta(fasta, [sequence for _, sequence in sample_records(30, 6, seed=0)], 30)
    network = random_network("esm2_t6_8M", **TOY).train()
    asked, nats = [], []
    forward = network.forward

    def seen(input_ids: torch.Tensor, attention_mask: torch.Tensor):
        output = forward(input_ids=input_ids, attention_mask=attention_mask)
        masked = input_ids == MASK
        asked.append((int(masked.sum()), int(attention_mask.sum()) - 2 * len(input_ids)))
        nats.append(functional.log_softmax(output.logits[masked], -1))
        return output

    network.forward = seen
    bits = [Evaluation(str(fasta)).bits(network) for _ in range(2)]
    assert bits[0] == bits[1]  # the same masks
    assert network.training
    masked, residues = map(sum, zip(*asked, strict=True))
    assert masked / residues == pytest.approx(MASK_SHARE, rel=0.15)  # three standard deviations of 5,000 residues
    entropies = torch.cat(nats)
    assert bits[0] == pytest.approx(float(-entropies.mean()) / math.log(2), rel=0.05)  # random: all tokens alike
