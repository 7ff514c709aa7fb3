"""Gaussian processes on mutants, and their cross-validation."""

import gzip

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import check_grad

from esmeray.common.errors import ConfigError
from esmeray.inference.mutations import gaussian_process
from esmeray.inference.mutations.features import Features, kernels, substitution_features
from esmeray.inference.mutations.gaussian_process import Posterior, learn
from esmeray.inference.mutations.metrics import evaluation_of
from esmeray.inference.mutations.validation import folds, parts, predictions
from esmeray.inference.mutations.variants import Mutant, Protein
from tests.model.support import random_sequences

(WILD,) = random_sequences([30])
PROTEIN = Protein(WILD)
SINGLES = [*PROTEIN.singles()]


def features_of(mutants: list[Mutant], prior: np.ndarray, protein: Protein = PROTEIN) -> Features:
    return Features(substitution_features(protein, mutants) | {"prior": prior[:, None]})


def measured(size: int, seed: int = 0) -> tuple[Features, np.ndarray]:
    """Mutants with one to three mutations, a prior, and values: sums over the mutations plus noise."""
    random = np.random.default_rng(seed)
    effects = random.normal(size=(30, 20)) + random.normal(size=(30, 1))
    groups = [random.choice(len(SINGLES), random.integers(1, 4), replace=False) for _ in range(size)]
    texts = [{PROTEIN.text(m)[1:-1]: PROTEIN.text(m) for n in g for m in SINGLES[n].mutations} for g in groups]
    mutants = [PROTEIN.mutant(":".join(by_position.values())) for by_position in texts]
    values = [sum(effects[m.offset, ord(m.mutant) % 20] for m in mutant.mutations) for mutant in mutants]
    prior = np.array(values) + 2 * random.normal(size=size)
    return features_of(mutants, (prior - prior.mean()) / prior.std()), np.array(values) + random.normal(size=size) / 2


def test_the_posterior_is_that_of_the_textbook():
    features, values = measured(60)
    train, test = features[:40], features[40:]
    posterior = Posterior(train, values[:40])
    weights = posterior.weights

    def kernel(left: Features, right: Features) -> np.ndarray:
        return sum(weights[name] * term for name, term in kernels(left, right).items()) + 1

    level, spread = values[:40].mean(), values[:40].std()
    prior = 0.5 * features.parts["prior"][:, 0]
    inverse = np.linalg.inv(kernel(train, train) + weights["noise"] * np.eye(40))
    gain = kernel(test, train) @ inverse
    mean = gain @ ((values[:40] - level) / spread - prior[:40]) + prior[40:]
    covariance = kernel(test, test) - gain @ kernel(train, test)
    found = posterior.predict(test)
    # The jitter is 1e-6 of the variance: it makes the matrix of mutants with equal features invertible.
    np.testing.assert_allclose(found.mean, level + spread * mean, atol=1e-3)
    np.testing.assert_allclose(posterior.covariance(test), spread**2 * covariance, atol=1e-3)
    np.testing.assert_allclose(found.deviation**2, np.diag(posterior.covariance(test)), atol=1e-3)
    # An interval is a normal distribution's with noise, scaled by the leave-one-out errors.
    targets = (values[:40] - level) / spread - prior[:40]
    errors = np.sort(np.abs(inverse @ targets) / np.sqrt(np.diag(inverse)))[int(np.ceil(0.9 * 41)) - 1] / 1.6449
    assert posterior.scale == pytest.approx((40 * errors + 20) / 60, abs=1e-2)
    nothing = Posterior(features[:0], values[:0])
    np.testing.assert_allclose(nothing.predict(test).mean, prior[40:], atol=1e-6)


def test_weights_are_a_maximum_and_inducing_mutants_change_little(monkeypatch):
    features, values = measured(500)
    terms = [*kernels(features[:50], features[:50]).values()]
    rest = terms, values[:50], np.zeros(len(terms) + 1)
    # Forward differences with a step of 1e-8, of values of some hundred.
    for logs in np.random.default_rng(0).normal(size=(3, len(terms) + 1)):
        gradient_error = check_grad(
            lambda x: gaussian_process._negative_log_posterior(*rest, x)[0],
            lambda x: gaussian_process._negative_log_posterior(*rest, x)[1],
            logs,
        )
        assert gradient_error < 1e-3
    whole = Posterior(features[:400], values[:400])
    monkeypatch.setattr(gaussian_process, "_INDUCING", 200)
    fewer = Posterior(features[:400], values[:400], whole.weights)
    assert np.corrcoef(whole.predict(features[400:]).mean, fewer.predict(features[400:]).mean)[0, 1] > 0.97
    assert learn(features[:400], values[:400], np.ones(400)) == whole.weights


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
    with pytest.raises(ConfigError, match="folds modulo: need single mutants; use only random"):
        folds("modulo", [double], 0)
    with pytest.raises(ConfigError, match="sizes 241: a training set has only 240 mutants; give a smaller size"):
        parts(np.arange(300) % 5, 241, 0)
    ((train, test),) = parts(folds("rest", few, 0), 40, 0)
    assert len(train) == 40 and {*train, *test} == {*range(len(few))} and len(test) == len(few) - 40


def test_no_prediction_is_by_a_model_that_saw_the_mutant():
    features, values = measured(300)
    fold = np.arange(300) % 5
    wanted = predictions(features, values, parts(fold, None, 0))
    found = predictions(features, np.where(fold == 2, 100.0, values), parts(fold, None, 0))
    np.testing.assert_allclose(found.mean[fold == 2], wanted.mean[fold == 2])
    assert abs(found.mean[fold != 2] - wanted.mean[fold != 2]).min() > 0
    assert 0.85 < ((wanted.low <= values) & (values <= wanted.high)).mean() < 0.95
    assert np.isnan(predictions(features, values, parts(0 * fold, 50, 0)).mean).sum() == 50


def test_a_fit_on_240_mutants_of_beta_lactamase_beats_the_column(shared_data):
    with gzip.open(shared_data / "mutations" / "beta_lactamase.csv.gz", "rt") as file:
        table = pd.read_csv(file).dropna()
    sequence = "".join((shared_data / "mutations" / "beta_lactamase.fasta").read_text().split("\n")[1:])
    protein = Protein(sequence, first=24)
    mutants = [protein.mutant(text) for text in table["mutant"]]
    values, column = table["score"].to_numpy(), table["deep_sequence"].to_numpy()
    features = features_of(mutants, (column - column.mean()) / column.std(), protein)
    for kind in ("random", "modulo", "contiguous"):
        predicted = predictions(features, values, parts(folds(kind, mutants, 0), 240, 0))
        scores = {"model": predicted.mean, "column": column}
        evaluation = evaluation_of(scores, values, samples=1)
        found = evaluation["metrics"]["spearman"]
        assert found > evaluation["baselines"]["column"]["metrics"]["spearman"], kind
        assert 0.85 < ((predicted.low <= values) & (values <= predicted.high)).mean() < 0.95, kind


def test_intervals_beyond_the_inducing_points_cover_what_they_say(monkeypatch):
    monkeypatch.setattr(gaussian_process, "_INDUCING", 50)
    features, values = measured(1000)
    found = Posterior(features[:600], values[:600]).predict(features[600:])
    assert 0.83 < ((found.low <= values[600:]) & (values[600:] <= found.high)).mean() < 0.97
