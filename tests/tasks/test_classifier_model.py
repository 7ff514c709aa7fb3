"""A classifier's output is independent of the rest of a batch; its loss and metrics are sums over the targets."""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional

from esmeray.common.errors import ConfigError
from esmeray.dataset.labels.label_space import LabelSpace
from esmeray.dataset.packed_batch import FEATURES, TARGETS, WEIGHTS, PackedBatch
from esmeray.dataset.targets import IGNORED_TARGET, has_target
from esmeray.dataset.tokens.esm import pack_sequences
from esmeray.model.backbones.loading import build_backbone
from esmeray.model.heads.settings import check_pooling
from esmeray.model.section import ClassifierSection
from esmeray.tasks.classifier.model import Classifier
from tests.model.support import TINY, assert_near, batch_of_lengths, random_sequences, segments

NAMES = {"binary": ("no", "yes"), "per_residue": ("C", "E", "H")}
KINDS = ["multiclass", "binary", "multilabel", "regression", "per_residue"]
POOLINGS = ["mean", "max", "cls", "last", "light_attention"]
LENGTHS = [12, 1, 40, 3, 7]


def build(kind="multiclass", *, around=(1, 1), **settings) -> Classifier:
    section = ClassifierSection(**{"dropout": 0.0, "hidden_size": 16} | settings)
    space = LabelSpace(kind=kind, names=NAMES.get(kind, ("a", "b", "c")))
    backbone = build_backbone(TINY, seed=0)
    torch.manual_seed(0)
    return Classifier(backbone, section, space, num_prefix=around[0], num_suffix=around[1])


def with_targets(batch: PackedBatch, kind: str) -> PackedBatch:
    draw = torch.Generator().manual_seed(0)
    rows = batch.num_tokens if kind == "per_residue" else batch.num_sequences
    if kind == "regression":
        targets = torch.randn(rows, 3, generator=draw)
    elif kind == "multilabel":
        targets = torch.rand(rows, 3, generator=draw).round()
    else:
        targets = torch.randint(2, (rows,), generator=draw)
    targets[4::5] = math.nan if targets.is_floating_point() else IGNORED_TARGET
    if kind == "per_residue":
        targets[batch.tokens < 4] = IGNORED_TARGET
    return with_tensor(dataclasses.replace(batch, by_token={}, by_sequence={}), kind, targets)


def with_tensor(batch: PackedBatch, kind: str, targets: torch.Tensor) -> PackedBatch:
    return batch.adding(**{"by_token" if kind == "per_residue" else "by_sequence": {TARGETS: targets}})


def labelled(kind: str, lengths=LENGTHS) -> PackedBatch:
    return with_targets(pack_sequences(random_sequences(lengths)), kind)


def one_by_one(batch: PackedBatch, kind: str) -> list[PackedBatch]:
    """Split a batch into batches of one sequence each, with its targets."""
    targets = segments(batch.targets, batch) if kind == "per_residue" else batch.targets.split(1)
    return [
        with_tensor(dataclasses.replace(batch_of_lengths([len(tokens)]), tokens=tokens), kind, rows)
        for tokens, rows in zip(segments(batch.tokens, batch), targets, strict=True)
    ]


def gradients(model: Classifier, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_packed_equals_one_at_a_time_in_outputs_loss_and_gradients(pooling):
    model, batch = build(pooling=pooling, head="mlp"), labelled("multiclass")
    alone = one_by_one(batch, "multiclass")
    expected = torch.cat([model.logits(one) for one in alone])
    assert_near(model.logits(batch), expected)
    packed_loss, alone_loss = model(batch).loss_sum, sum(model(one).loss_sum for one in alone)
    assert_near(packed_loss, alone_loss)
    assert_near(gradients(model, packed_loss), gradients(model, alone_loss))


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_do_not_depend_on_how_sequences_are_batched(kind):
    model, batch = build(kind), labelled(kind)
    whole = model(batch)
    alone = [model(sequence) for sequence in one_by_one(batch, kind)]
    added = {name: sum(output.metrics[name] for output in alone) for name in whole.metrics}
    assert model.metrics(added) == pytest.approx(model.metrics(whole.metrics), rel=1e-5)
    assert whole.num_targets == sum(output.num_targets for output in alone) == has_target(batch.targets).sum()
    assert all(value.dtype == torch.float64 and not value.requires_grad for value in whole.metrics.values())
    assert whole.loss_sum.dtype == torch.float32 and whole.num_targets.dtype == torch.int64

    weights = torch.tensor([2.0, 0.0, 0.5, 1.0, 3.0])
    weighted = model(batch.adding(by_sequence={WEIGHTS: weights}))
    assert_near(weighted.loss_sum, sum(weight * output.loss_sum for weight, output in zip(weights, alone, strict=True)))
    assert weighted.num_targets == whole.num_targets
    assert all(torch.equal(weighted.metrics[name], whole.metrics[name]) for name in whole.metrics if name != "loss")


def test_metrics_of_labels_are_those_of_the_known_ones():
    model, batch = build("multilabel"), labelled("multilabel")
    batch.targets[0, 0] = batch.targets[1, 2] = math.nan
    values, logits, known = model.metrics(model(batch).metrics), model.logits(batch), ~batch.targets.isnan()
    truth, called = batch.targets == 1, (logits > 0) & known
    losses = functional.binary_cross_entropy_with_logits(logits, batch.targets, reduction="none")
    assert values["loss"] == pytest.approx(losses.nanmean(1).nanmean().item(), rel=1e-5)
    right = (called == truth).all(-1)[known.any(-1)]
    assert values["accuracy"] == pytest.approx(right.float().mean().item())
    assert values["f1_micro"] == pytest.approx(2 * (called & truth).sum().item() / (called.sum() + truth.sum()).item())


def test_metrics_of_numbers_leave_out_unknown_ones():
    model, batch = build("regression"), labelled("regression")
    batch.targets[0, 1] = batch.targets[2, 0] = math.nan
    outputs, targets = model.logits(batch), batch.targets
    values, errors = model.metrics(model(batch).metrics), (outputs - targets).square()
    assert values["mse"] == pytest.approx(errors.nanmean().item(), rel=1e-5)
    assert values["loss"] == pytest.approx(errors.nanmean(1).nanmean().item(), rel=1e-5)
    unexplained = errors.nansum(0) / (targets - targets.nanmean(0)).square().nansum(0)
    assert values["r2"] == pytest.approx((1 - unexplained).mean().item(), rel=1e-4)
    batch = labelled("regression", [5] * 8)
    batch.targets[has_target(batch.targets), 1] = 3.3  # of seven, whose squares do not add up to the last bit
    assert "r2" not in model.metrics(model(batch).metrics)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "per_residue", "pooling": "max"}, "data.labels.kind per_residue does not pool"),
        ({"pooling": "cls", "around": (0, 1)}, "adds no token before a sequence"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build(**settings)
    with pytest.raises(ConfigError, match="the first token does not see"):
        check_pooling(ClassifierSection(pooling="cls"), "binary", causal=True)


def test_targets_of_another_kind_are_refused():
    batch = labelled("multiclass")
    for settings in ({"pooling": "light_attention"}, {"kind": "per_residue"}):
        with pytest.raises(ValueError, match="expected features per token, found"):
            build(**settings).logits(batch.adding(by_sequence={FEATURES: torch.zeros(5, 32)}))
    for kind, targets in (
        ("multiclass", batch.targets.float()),
        ("multilabel", torch.zeros(5, 2)),
        ("per_residue", batch.targets),
    ):
        with pytest.raises(ValueError, match=f"targets of {kind} must be"):
            build(kind)(with_tensor(batch, kind, targets))
    with pytest.raises(ValueError, match="needs a batch with targets"):
        build()(pack_sequences(["MKT"]))


@pytest.mark.parametrize(("kind", "loss"), [("multiclass", 1.066631), ("regression", 1.072969)])
def test_the_loss_at_a_fixed_seed_is_the_known_one(kind, loss):
    """Reference values (fp32, CPU): a change that should not affect numerics must not change them."""
    model, batch = build(kind), labelled(kind)
    output = model(batch)
    assert (output.loss_sum / output.num_targets).item() == pytest.approx(loss, rel=1e-5)
    rounded = model.bfloat16()(batch).loss_sum
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, output.loss_sum, rtol=0.02, atol=0)
