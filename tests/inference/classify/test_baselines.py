import numpy as np
import pytest

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.targets import IGNORED_TARGET
from esmeray.inference.classify.baselines import baselines
from esmeray.model.metrics.classification import classification_metrics

LOGISTIC = "logistic regression on composition"


def proteins(records, seed=0, classes=3):
    """Sequences in which each class is rich in its own amino acid."""
    generator = np.random.default_rng(seed)
    targets = generator.integers(classes, size=records)
    letters = np.array(list(AMINO_ACIDS))
    rates = np.full((classes, 20), 1.0) + 4.0 * np.eye(20)[:classes]
    rates /= rates.sum(axis=1, keepdims=True)
    return ["".join(generator.choice(letters, size=80, p=rates[target])) for target in targets], targets


def test_classes_that_differ_in_composition_are_distinguished():
    texts, targets = proteins(150)
    asked, wanted = proteins(60, seed=1)
    found = baselines("multiclass", "protein", texts, targets, asked, num_outputs=4)
    assert set(found) == {"majority class", LOGISTIC}
    for name, predictions in found.items():
        assert predictions.shape == (60, 4)
        assert predictions.dtype == np.float32
        np.testing.assert_allclose(predictions.sum(axis=1), 1, atol=1e-5)
        assert not predictions[:, 3].any(), "a class that training lacks is never predicted"
        values = classification_metrics("multiclass", predictions, wanted)
        assert values["accuracy"] > 0.8 if name != "majority class" else values["auroc"] == 0.5


def test_labels_are_fitted_one_by_one_with_unknown_ones_left_out():
    texts, classes = proteins(120)
    asked, wanted = proteins(60, seed=1)
    targets = np.eye(4, dtype=np.float32)[classes]
    targets[:20, 0] = np.nan
    targets[5] = np.nan
    found, known = (baselines("multilabel", "protein", texts[n:], targets[n:], asked, 4) for n in (0, 20))
    for name in ("majority class", LOGISTIC):
        assert not found[name][:, 3].any(), "a label that no training record has"
        np.testing.assert_allclose(found[name][:, 0], known[name][:, 0], rtol=1e-5)
    assert classification_metrics("multilabel", found[LOGISTIC], np.eye(4)[wanted])["auroc"] > 0.9


@pytest.mark.parametrize("content", ["protein", "text"])
def test_numbers_get_the_mean_and_a_ridge_regression(content):
    texts, _ = proteins(120)
    asked, _ = proteins(60, seed=1)
    if content == "text":
        texts, asked = ([" ".join(text) for text in group] for group in (texts, asked))

    def measured(group):
        return np.array([[text.count("A"), -text.count("A")] for text in group], dtype=np.float32)

    targets = measured(texts)
    mean = targets[:, 0].mean()
    targets[3, 1] = np.nan
    found = baselines("regression", content, texts, targets, asked, 2)
    np.testing.assert_allclose(found["mean"][:, 0], mean, rtol=1e-5)
    ridge = found[f"ridge regression on {'TF-IDF' if content == 'text' else 'composition'}"]
    assert classification_metrics("regression", ridge, measured(asked))["spearman"] > 0.9


def test_residues_get_the_shares_of_their_amino_acid():
    targets = np.array([0, 1, 1, 0, IGNORED_TARGET, 1])
    found = baselines("per_residue", "protein", ["AAC", "CDC"], targets, ["ACD", "W"], 2)
    np.testing.assert_allclose(found["class of the residue"][:2], [[0.5, 0.5], [1 / 3, 2 / 3]], rtol=1e-6)
    np.testing.assert_allclose(found["class of the residue"][2:], found["majority class"][2:])
    assert found["majority class"].shape == (4, 2)


def test_without_anything_to_learn_the_majority_label_remains():
    found = baselines("binary", "protein", ["AC"] * 4, np.array([1, 1, 0, IGNORED_TARGET]), ["AC", "D"], 2)
    np.testing.assert_allclose(found["majority class"], [[1 / 3, 2 / 3]] * 2, rtol=1e-6)
    assert set(baselines("binary", "protein", ["AC", "DE"], np.array([1, 1]), ["AC"], 2)) == {"majority class"}
    assert set(baselines("binary", "text", ["?", "!"], np.array([0, 1]), ["?"], 2)) == {"majority class"}
