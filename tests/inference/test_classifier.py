from dataclasses import replace

import numpy as np
import pytest
import torch

from esmeray.common.errors import ConfigError
from esmeray.dataset.fasta.alphabet import UnknownLetters
from esmeray.dataset.packed_batch import TARGETS
from esmeray.dataset.targets import LabelSpace
from esmeray.inference.classifier import ClassifierPipeline, Predictions
from esmeray.model.heads.losses import probabilities
from esmeray.model.metrics.classification import bootstrap_intervals, classification_metrics, metrics_of_each
from tests.classifiers import NAMES, TEXTS, export_tiny, tiny_classifier, tiny_model
from tests.model.support import random_sequences

PROTEINS = random_sequences([30, 1, 90, 12, 90, 5])


def pipeline(source="esm2_t6_8M", kind="multiclass", *, model_settings=None, **options) -> ClassifierPipeline:
    model = tiny_model(source, kind, options.pop("precision", "fp32"), **(model_settings or {}))
    return ClassifierPipeline(model, **options)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("esm2_t6_8M", "per_residue"),
        ("qwen2", "multiclass"),
    ],
)
def test_packed_padded_and_one_at_a_time_agree(source, kind):
    texts, budget = (TEXTS, 16) if source == "qwen2" else (PROTEINS, 128)
    packed = pipeline(source, kind, tokens=budget)
    padded = pipeline(source, kind, tokens=budget, model_settings={"backbone": {"padded": True}})
    alone = np.concatenate([packed.predict([text]).probabilities for text in texts])
    for made in (packed, padded):
        found = made.predict(texts).probabilities
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, alone, rtol=0, atol=1e-5)
    assert packed.predict([]).probabilities.shape == (0, alone.shape[1]) and packed.predict([]).labels() == []


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.05), ("fp16", 0.01)])
def test_half_precision_gives_nearly_the_same_in_fp32(precision, tolerance):
    found = pipeline(precision=precision).predict(PROTEINS).probabilities
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, pipeline().predict(PROTEINS).probabilities, rtol=0, atol=tolerance)
    buffers = dict(pipeline("qwen2", precision=precision).classifier.named_buffers())
    assert {buffer.dtype for name, buffer in buffers.items() if "inv_freq" in name} == {torch.float32}


def test_a_label_at_a_probability_of_a_half_is_predicted_nowhere():
    model, _ = tiny_classifier(kind="multilabel")
    logits = torch.tensor([[0.0, 1e-9, 3.0], [-3.0, 0.0, 0.1]])  # the sigmoid of 1e-9 is 0.5 in fp32
    targets = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    batch = pipeline().model.input_of([b"MK", b"MKV"]).batch.adding(by_sequence={TARGETS: targets})
    in_training = model.metrics(model.output_of(logits, batch).metrics)
    scores = probabilities(logits, "multilabel").numpy()
    in_report = classification_metrics("multilabel", scores, targets)
    for values in (in_training, in_report):
        assert (values["accuracy"], values["f1_micro"]) == (1.0, 1.0)
    assert bootstrap_intervals("multilabel", scores, targets, samples=5, seed=0)["f1_micro"] == (1.0, 1.0)
    assert [values["predicted"] for values in metrics_of_each("multilabel", scores, targets)] == [0, 0, 2]
    assert Predictions(model.label_space, scores, None, np.zeros(2, np.int64)).labels() == ["GO:3", "GO:3"]
    numbers = LabelSpace("regression", NAMES["regression"])
    assert Predictions(numbers, np.float32([[1.5, -2]]), None, np.zeros(1, np.int64)).labels("|") == ["1.5|-2"]


def test_residues_that_the_vocabulary_lacks_are_counted_in_a_warning():
    model = tiny_model()
    model.facts = replace(model.facts, unknown=UnknownLetters("UX", "<unk>"))
    with pytest.warns(UserWarning, match=r"^2 residues unknown to the vocabulary \(U, X\), read as <unk>") as caught:
        assert len(ClassifierPipeline(model).predict(["MKUAX"])) == 1
    assert caught[0].filename == __file__


def test_a_device_that_is_not_there_is_refused(tmp_path):
    folder = export_tiny(tmp_path / "model")
    for device, message in (("cuda:99", "torch finds . CUDA devices"), ("gpu", "unknown device")):
        with pytest.raises(ConfigError, match=message):
            ClassifierPipeline.load(folder, device=device)
