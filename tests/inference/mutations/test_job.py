"""Scores equal a plain loop with transformers over single sequences."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from esmeray.common.errors import ConfigError
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.mutations import job
from esmeray.inference.mutations.job import Scorer
from esmeray.inference.mutations.section import MutationsSection
from esmeray.inference.mutations.variants import Mutant, Protein, Variant
from tests.damage import killed_in_piece
from tests.dataset.tokenizer_folders import esm, esmc
from tests.inference.models.opened import opened
from tests.model.small_models import save_masked_lm
from tests.model.support import random_sequences

(WILD,) = random_sequences([23])
PROTEIN = Protein(WILD)
MUTANTS = [
    *([PROTEIN.mutant(f"{WILD[index]}{index + 1}{letter}") for index in (0, 9, 22) for letter in "AWC"]),
    PROTEIN.mutant(f"{WILD[4]}5G:{WILD[17]}18P"),
    Mutant(),
]
INDELS = [Mutant(whole=WILD[:7] + WILD[9:]), Mutant(whole=WILD[:12] + "GGS" + WILD[12:])]
MODELS: dict[str, tuple[Callable[[Path], Path], int]] = {"esm": (esm, 33), "esmc": (esmc, 64)}


def scorer(source: Path, folder: Path, method: str = "masked", **more: Any) -> Scorer:
    return Scorer(str(source), MutationsSection(method=method, precision="fp32", device="cpu", **more), folder)


def variants(mutants: list[Mutant]) -> list[Variant]:
    return [Variant(PROTEIN, mutant) for mutant in mutants]


def plain_log_p(source: Path, network: Any, sequence: str, offset: int, window: int, masked: bool) -> dict[str, float]:
    """Log-probabilities of the amino acids at an offset of a sequence, computed with transformers only."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    start = min(max(0, offset - window // 2), max(0, len(sequence) - window))
    ids = tokenizer(sequence[start : start + window], return_tensors="pt").input_ids
    row = offset - start + 1
    if masked:
        ids[0, row] = tokenizer.mask_token_id
    with torch.no_grad():
        log_p = network(input_ids=ids).logits[0, row].log_softmax(-1).tolist()
    return {letter: log_p[tokenizer.convert_tokens_to_ids(letter)] for letter in AMINO_ACIDS}


@pytest.mark.parametrize(("kind", "window"), [("esm", 1022), ("esm", 8), ("esmc", 8), ("esmc", 30)])
def test_scores_equal_a_plain_loop_for_each_method(tmp_path, kind, window):
    make, vocabulary = MODELS[kind]
    source = make(tmp_path / "model")
    network = save_masked_lm(source, kind, vocab_size=vocabulary)

    def log_p(sequence: str, offset: int, masked: bool) -> dict[str, float]:
        return plain_log_p(source, network, sequence, offset, window, masked)

    for method in ("wild_type", "masked"):
        found = scorer(source, tmp_path / method, method, max_length=window, tokens=64).zero_shot(variants(MUTANTS))
        for mutant, score in zip(MUTANTS, found, strict=True):
            at = [(log_p(WILD, m.offset, method == "masked"), m) for m in mutant.mutations]
            assert score == pytest.approx(sum(log[m.mutant] - log[m.wild] for log, m in at), abs=1e-5)
    mixed = [MUTANTS[0], INDELS[1]]
    sequences = [WILD, *(mutant.sequence(WILD) for mutant in mixed)]
    wild, *wanted = (sum(log_p(text, index, True)[text[index]] for index in range(len(text))) for text in sequences)
    found = scorer(source, tmp_path / "pseudo", "pseudo", max_length=window, tokens=64).zero_shot(variants(mixed))
    np.testing.assert_allclose(found, np.array(wanted) - wild, atol=1e-5 * 23)
    if window > len(WILD):  # the output masks each position of whole sequences, and leaves out X
        rows = opened(source).embed([*sequences, "XX"], "pseudo_log_likelihood", tokens=64)
        sums, counts = [wild, *wanted, 0], [*map(len, sequences), 0]
        expected = np.column_stack([np.divide(sums, np.maximum(counts, 1)), sums, counts])
        np.testing.assert_allclose(rows, expected, rtol=1e-5)


def test_a_killed_job_computes_only_what_is_not_done_and_gives_the_same(tmp_path, monkeypatch):
    source = esm(tmp_path / "model")
    save_masked_lm(source, "esm", vocab_size=33)
    whole = scorer(source, tmp_path / "whole").zero_shot(variants(MUTANTS))
    monkeypatch.setattr(job, "PIECE_TOKENS", 2 * len(WILD))  # two positions
    wanted = scorer(source, tmp_path / "pieces").zero_shot(variants(MUTANTS))
    np.testing.assert_allclose(wanted, whole, atol=1e-6)
    asked: list[int] = []
    original = Scorer.log_probabilities

    def counted(self: Scorer, sequences: Any, wanted_M2: Any, masked: bool) -> Any:
        asked.extend(wanted_M2[:, 1].tolist())
        return original(self, sequences, wanted_M2, masked)

    monkeypatch.setattr(Scorer, "log_probabilities", counted)
    with killed_in_piece(2), pytest.raises(KeyboardInterrupt):
        scorer(source, tmp_path / "killed").zero_shot(variants(MUTANTS))
    assert asked == [0, 4, 9, 17]
    asked.clear()
    np.testing.assert_array_equal(scorer(source, tmp_path / "killed").zero_shot(variants(MUTANTS)), wanted)
    assert asked == [9, 17, 22]
    with pytest.raises(ConfigError, match="contains the work of another job"):
        scorer(source, tmp_path / "killed").zero_shot(variants(MUTANTS[:3]))
