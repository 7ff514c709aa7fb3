"""Designs of ProteinMPNN depend on their seed alone, and keep what was asked for."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.design.autoregression import AutoregressiveDesigner
from esmeray.inference.design.sampling import Design, Request, generate, log_likelihoods
from tests.model.structures.test_proteinmpnn import broken_dimer, small_model
from tests.structures import folds

FOLDS = folds(2)
LENGTH = len(FOLDS[0].residues)


@cache
def designer() -> AutoregressiveDesigner:
    model = small_model()
    with torch.no_grad():
        model.W_out.weight.mul_(20)  # random weights are too indifferent for tests
    return AutoregressiveDesigner(model, "random (no license)")


def designs(*requests: Request, number: int = 2, tokens: int = 8192, seed: int = 0) -> list[Design]:
    return list(generate(designer(), requests, number, seed=seed, tokens=tokens))


def texts(*requests: Request, **options: int) -> list[str]:
    return [design.residues for design in designs(*requests, **options)]


def test_a_design_depends_on_its_seed_alone_and_not_on_its_batch():
    requests = [Request(structure, temperature=1.0) for structure in (*FOLDS, broken_dimer())]
    together = texts(*requests)
    assert together == texts(*requests, tokens=1) == [text for one in requests for text in texts(one)]
    assert len(set(together)) == 6 and texts(*requests, seed=1)[0] != together[0]


def test_probabilities_and_likelihoods_agree():
    (design,) = designs(Request(FOLDS[0], temperature=0.0), number=1)
    columns = [AMINO_ACIDS.index(letter) for letter in design.residues]
    assert (design.probabilities.argmax(axis=1) == columns).all()
    assert design.probabilities.sum(axis=1) == pytest.approx(1, abs=1e-5)
    others = [design.residues[::-1], FOLDS[0].residues]
    scores = log_likelihoods(designer(), FOLDS[0], [design.residues, *others], tokens=1)
    assert scores[0] > scores[2] and scores == pytest.approx(
        log_likelihoods(designer(), FOLDS[0], [design.residues, *others]), abs=1e-4
    )


def test_fixed_omitted_and_biased_letters():
    native, bias = FOLDS[0].residues, np.zeros((LENGTH, 20), np.float32)
    bias[:, [AMINO_ACIDS.index(letter) for letter in "ACDE"]] = -np.inf
    bias[10:20, AMINO_ACIDS.index("W")] = 1000
    for text in texts(Request(FOLDS[0], fixed=(0, 1, 5), bias=bias, temperature=1.0), number=4):
        assert text[:2] + text[5] == native[:2] + native[5] and text[10:20] == 10 * "W"
        assert not set("ACDE") & set(text[2:5] + text[6:])


def test_residues_without_coordinates_keep_their_letter_unless_they_are_tied():
    dimer = broken_dimer()
    dimer = replace(dimer, residues=dimer.residues[:60] + "X" + dimer.residues[61:])
    (text,) = texts(Request(dimer), number=1)
    assert text[60] == "X" and set(text[:60] + text[61:]) <= set(AMINO_ACIDS)
    ties = tuple((index, LENGTH + index) for index in range(60, 70))
    (text,) = texts(Request(dimer, tied=ties, fixed=(65,)), number=1)
    assert text[60:70] == text[LENGTH + 60 : LENGTH + 70] and text[65] == dimer.residues[65] and text[60] != "X"
    whole, letter = (log_likelihoods(designer(), dimer, [dimer.residues.replace("X", x)])[0] for x in "XA")
    assert whole == pytest.approx(letter, abs=1e-5)
