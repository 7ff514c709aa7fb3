"""K-mers lie within one sequence and have standard residues only; features are sums of their vectors."""

import torch

from esmeray.dataset.tokens.esm import STANDARD_RESIDUES, VOCABULARY
from esmeray.model.heads.pooling import mean_over_residues
from esmeray.model.relatives import KMERS, PATTERNS, KmerBackbone
from tests.model.support import assert_near, pack_sequences

LETTERS = "".join(VOCABULARY[residue] for residue in STANDARD_RESIDUES)


def test_mean_features_equal_the_sum_over_a_sequences_own_kmers():
    sequences = ["MKTAYIAKQRQ", "MKXAYIUKQ", "AC", "WWWWWW"]
    batch = pack_sequences(sequences)
    backbone = KmerBackbone(5)
    rows = backbone.model.table.weight
    rows[-1].zero_()  # padding row for positions without a k-mer
    expected = []
    for text in sequences:
        total = torch.zeros(5)
        for number, places in enumerate(PATTERNS):
            for start in range(len(text) - places[-1]):
                letters = [text[start + place] for place in places]
                if all(letter in LETTERS for letter in letters):
                    first, second, third = map(LETTERS.index, letters)
                    total += rows[number * KMERS + first * 400 + second * 20 + third]
        expected.append(total / len(text))
    assert_near(mean_over_residues(backbone(batch), batch), torch.stack(expected))
