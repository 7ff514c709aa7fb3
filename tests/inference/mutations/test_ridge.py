import gzip

import numpy as np
import pandas as pd
import pytest

from esmeray.common.errors import ConfigError
from esmeray.inference.mutations.metrics import evaluation_of
from esmeray.inference.mutations.ridge import cross_validated, fit, folds, one_hot, with_composition
from esmeray.inference.mutations.variants import Mutant, Protein
from tests.model.support import random_sequences

(WILD,) = random_sequences([30])
PROTEIN = Protein(WILD)
SINGLES = [*PROTEIN.singles()]


@pytest.mark.parametrize("with_zero_shot", [False, True])
def test_columns_of_one_row_change_the_time_of_a_fit_and_not_its_result(with_zero_shot):
    random = np.random.default_rng(0)
    zero_shot, measured = with_zero_shot * random.normal(size=len(SINGLES)), random.normal(size=len(SINGLES))
    features, train = with_composition(one_hot(PROTEIN, SINGLES)), random.permutation(len(SINGLES))[:300]
    own = fit(features[train], zero_shot[train], measured[train])
    whole = fit(features.toarray()[train], zero_shot[train], measured[train])
    np.testing.assert_allclose(own.predict(features, zero_shot), whole.predict(features, zero_shot), atol=1e-6)
    np.testing.assert_allclose(own.weights, whole.weights, atol=1e-6)
    doubles = [PROTEIN.mutant(f"{WILD[0]}1{letter}:{WILD[1]}2{letter}") for letter in "GP"]
    assert not np.isnan(fit(one_hot(PROTEIN, [*SINGLES, *doubles]), np.zeros(572), np.arange(572.0)).weights).any()


def test_folds_are_those_of_proteingym():
    few = [mutant for mutant in SINGLES if mutant.mutations[0].offset not in (3, 4)]  # 28 positions
    offsets = np.array([mutant.mutations[0].offset for mutant in few])
    _, order = np.unique(offsets, return_inverse=True)
    np.testing.assert_array_equal(folds("modulo", few, 0), order % 5)
    sizes = np.repeat([0, 1, 2, 3, 4], [6, 6, 6, 5, 5])
    np.testing.assert_array_equal(folds("contiguous", few, 0), sizes[order])
    drawn = folds("random", few, 1)
    assert {*drawn} == {0, 1, 2, 3, 4} and (drawn != folds("random", few, 2)).any()
    double = PROTEIN.mutant(f"{WILD[0]}1A:{WILD[1]}2C")
    with pytest.raises(ConfigError, match="folds modulo: are of single mutants; give random alone"):
        folds("modulo", [double], 0)


def test_no_prediction_is_by_a_model_that_saw_the_mutant():
    random = np.random.default_rng(0)
    features, nothing = random.normal(size=(300, 5)), np.zeros(300)
    measured, fold = random.normal(size=300), np.arange(300) % 5
    wanted = cross_validated(features, nothing, measured, fold, None, 0)
    changed = np.where(fold == 2, 100.0, measured)
    found = cross_validated(features, nothing, changed, fold, None, 0)
    np.testing.assert_allclose(found[fold == 2], wanted[fold == 2])
    assert abs(found[fold != 2] - wanted[fold != 2]).min() > 0
    with pytest.raises(ConfigError, match="sizes 241: a training part has 240 mutants; give fewer"):
        cross_validated(features, nothing, measured, fold, 241, 0)


def test_on_240_mutants_of_beta_lactamase_the_model_is_better_than_either_part(shared_data):
    with gzip.open(shared_data / "mutations" / "beta_lactamase.csv.gz", "rt") as file:
        table = pd.read_csv(file).dropna()
    sequence = "".join((shared_data / "mutations" / "beta_lactamase.fasta").read_text().split("\n")[1:])
    protein = Protein(sequence, first=24)
    mutants: list[Mutant] = [protein.mutant(text) for text in table["mutant"]]
    measured, zero_shot = table["score"].to_numpy(), table["deep_sequence"].to_numpy()
    alone, nothing = one_hot(protein, mutants), np.zeros(len(mutants))
    for kind in ("random", "modulo", "contiguous"):
        rest = measured, folds(kind, mutants, 0), 240
        scores = {seed: cross_validated(with_composition(alone), zero_shot, *rest, int(seed)) for seed in "012"}
        scores |= {"column": zero_shot, "one-hot": cross_validated(alone, nothing, *rest, 0)}
        spearman = {name: evaluation_of({name: values}, measured, samples=1) for name, values in scores.items()}
        found = {name: evaluation["metrics"]["spearman"] for name, evaluation in spearman.items()}
        assert np.mean([found[seed] for seed in "012"]) > max(found["column"], found["one-hot"]), kind
