"""Losses equal torch's and scikit-learn's own if these have them, and are 0 for ignored targets."""

import math

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch.nn import functional

from esmeray.common.errors import ConfigError
from esmeray.dataset.targets import IGNORED_TARGET
from esmeray.model.heads.losses import TargetLoss, balanced_class_weights
from esmeray.model.heads.settings import check_loss
from esmeray.model.section import ClassifierSection

ROWS, CLASSES = 6, 4
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0])


def loss_of(kind, weights=None, label_weights=None, **settings):
    return TargetLoss(ClassifierSection(**settings), kind, weights, label_weights)


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return torch.randn(ROWS, CLASSES, requires_grad=True)


@pytest.fixture
def classes():
    return torch.tensor([0, 3, 1, 1, 2, 3])


@pytest.fixture
def labels():
    return torch.tensor([[1.0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize("weights", [None, CLASS_WEIGHTS])
def test_losses_of_classes_labels_and_numbers_are_torchs(logits, classes, labels, weights):
    for smoothing in (0.0, 0.1):
        keywords = {"weight": weights, "label_smoothing": smoothing, "reduction": "none"}
        expected = functional.cross_entropy(logits, classes, **keywords)
        assert torch.equal(loss_of("multiclass", weights, label_smoothing=smoothing)(logits, classes), expected)
    expected = functional.binary_cross_entropy_with_logits(logits, labels, pos_weight=weights)
    torch.testing.assert_close(loss_of("multilabel", weights)(logits, labels).mean(), expected)
    torch.testing.assert_close(loss_of("regression")(logits, labels).mean(), functional.mse_loss(logits, labels))


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.2}], ids=str)
@pytest.mark.parametrize("weights", [None, CLASS_WEIGHTS])
def test_ignored_classes_have_no_loss_and_no_gradient(logits, classes, settings, weights):
    loss = loss_of("multiclass", weights, **settings)
    ignored = torch.tensor([False, True, False, False, True, False])
    expected = loss(logits, classes)
    losses = loss(logits, classes.masked_fill(ignored, IGNORED_TARGET))
    losses.sum().backward()
    assert losses[ignored].eq(0).all() and logits.grad[ignored].eq(0).all()
    torch.testing.assert_close(losses[~ignored], expected[~ignored])


def test_label_weights_multiply_the_loss_of_known_labels(logits, labels):
    labels[0, 1] = labels[1, :3] = math.nan
    labels[4] = math.nan
    by_label = torch.tensor([0.2, 3.0, 0.7, 0.0])
    losses = loss_of("multilabel", CLASS_WEIGHTS, by_label)(logits, labels)
    losses.sum().backward()
    columns = [loss_of("multilabel", CLASS_WEIGHTS[[k]])(logits[:, [k]], labels[:, [k]]) for k in range(CLASSES)]
    known = ~labels.isnan() * by_label
    expected = (torch.stack(columns, 1) * known).sum(1) / known.sum(1)
    torch.testing.assert_close(losses, expected.nan_to_num())
    assert losses[1] == losses[4] == 0 and logits.grad.isfinite().all()
    assert logits.grad[known == 0].eq(0).all() and logits.grad[known > 0].ne(0).all()


@pytest.mark.parametrize(
    ("kind", "settings", "key"),
    [
        ("multilabel", {"label_smoothing": 0.1}, "label_smoothing does not support data.labels.kind multilabel"),
        ("regression", {"label_smoothing": 0.1}, "label_smoothing"),
        ("regression", {"class_weights": "balanced"}, "class_weights"),
        ("binary", {"label_weights": "w.tsv"}, "label_weights needs data.labels.kind multilabel, not binary"),
    ],
)
def test_settings_of_the_loss_that_do_not_fit_the_targets_are_refused(kind, settings, key):
    with pytest.raises(ConfigError, match=key):
        check_loss(ClassifierSection(**settings), kind)


def test_balanced_weights_are_scikit_learns_and_of_labels_their_ratio(labels):
    targets = torch.tensor([0, 0, 0, 1, 2, 2, IGNORED_TARGET])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=targets[:-1].numpy())
    weights = balanced_class_weights("per_residue", targets.split(4), 3)
    torch.testing.assert_close(weights, torch.tensor(expected).float())
    never = balanced_class_weights("multiclass", [torch.tensor([0, 0, 2])], 4)[[1, 3]]
    assert never.tolist() == [1, 1]
    labels[0, 0] = math.nan
    weights = balanced_class_weights("multilabel", labels.split(4), CLASSES)
    for column in range(CLASSES):
        y = labels[:, column][~labels[:, column].isnan()].numpy()
        negative, positive = compute_class_weight("balanced", classes=np.arange(2), y=y)
        assert weights[column].item() == pytest.approx(positive / negative)
    alike = torch.tensor([[0.0, 1.0, math.nan], [0.0, 1.0, math.nan]])
    assert balanced_class_weights("multilabel", [alike], 3).tolist() == [1, 1, 1], "which never occur"
