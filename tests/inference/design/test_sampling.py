"""Designs are reproducible by their seed, and likelihoods and novelty follow their definitions."""

from functools import cache

import numpy as np
import pytest

from esmeray.alignment.scoring import scoring
from esmeray.alignment.search import Search
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.section import IngestSection
from esmeray.dataset.store.conversion import convert
from esmeray.dataset.store.reader import Store
from esmeray.inference.design.denoising import Denoiser
from esmeray.inference.design.sampling import Design, Request, generate, log_likelihoods, nearest, recovery
from tests.inference.embedding.jobs import write_proteins
from tests.model.support import random_sequences
from tests.structures import folds
from tests.tasks.test_diffusion_model import trained

pytestmark = pytest.mark.slow

FOLD = folds(1)[0]


@cache
def small_model() -> Denoiser:
    return Denoiser(trained(("helix", "barrel")))


def designs(number: int = 4, *, seed: int = 0, tokens: int = 8192, **request) -> list[Design]:
    asked = Request(request.pop("structure", FOLD), **{"steps": 5, "temperature": 1.0, **request})
    return list(generate(small_model(), [asked], number, seed=seed, tokens=tokens))


def test_a_design_depends_on_its_seed_alone_and_not_on_its_batch():
    together, alone = designs(6), designs(6, tokens=1)
    residues = [design.residues for design in together]
    assert [design.residues for design in alone] == residues
    assert [design.residues for design in designs(6, seed=1)] != residues


def test_likelihoods_are_higher_for_what_the_model_draws():
    drawn = [design.residues for design in designs(4, temperature=0.0)]
    random = np.random.default_rng(0)
    others = ["".join(random.choice(list(AMINO_ACIDS), len(FOLD.residues))) for _ in range(4)]
    scores = log_likelihoods(small_model(), FOLD, [*drawn, *others], tokens=500)
    assert scores.shape == (8,) and scores[:4].mean() > scores[4:].mean() and (scores < 0).all()
    assert recovery("ACDE", "ACDX") == 1 and recovery("AAAA", "ACAC") == 0.5


def test_novelty_is_the_difference_to_the_nearest_known_sequence(tmp_path):
    sequences = random_sequences([80, 300, 41, 120])
    known_fasta = write_proteins(tmp_path / "known.fasta", sequences, ["k0", "k1", "k2", "k3"])
    convert([str(known_fasta)], tmp_path / "store", IngestSection())
    known = Search(Store(tmp_path / "store"), scoring())
    assert nearest(sequences[1], known) == (0.0, "k1")
    swap = {letter: AMINO_ACIDS[index - 3] for index, letter in enumerate(AMINO_ACIDS)}
    changed = "".join(swap[letter] if index % 10 == 5 else letter for index, letter in enumerate(sequences[0]))
    assert nearest(changed[:40], known) == (pytest.approx(0.1), "k0")
