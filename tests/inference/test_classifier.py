import functools

import numpy as np
import pytest
import torch

from esmeray.common.errors import ConfigError, ResourceError
from esmeray.dataset.labels.label_space import LabelSpace
from esmeray.dataset.packed_batch import TARGETS
from esmeray.inference.classifier import ClassifierPipeline, Predictions
from esmeray.inference.models.source import config_of, exported_by
from esmeray.model.heads.losses import probabilities
from esmeray.model.metrics.classification import bootstrap_intervals, classification_metrics, metrics_of_each
from tests.classifiers import NAMES, TEXTS, classifier_config, export_tiny, tiny_classifier, tiny_model
from tests.model.support import random_sequences

PROTEINS = random_sequences([30, 1, 90, 12, 90, 5])


def pipeline(source="esm2_t6_8M", kind="multiclass", *, model_settings=None, **options) -> ClassifierPipeline:
    model = tiny_model(source, kind, options.pop("precision", "fp32"), **(model_settings or {}))
    return ClassifierPipeline(model, **options)


def one_at_a_time(made: ClassifierPipeline, texts) -> np.ndarray:
    return np.concatenate([made.predict([text]).probabilities for text in texts])


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("esm2_t6_8M", "multiclass"),
        ("esm2_t6_8M", "per_residue"),
        ("bert", "multilabel"),
        ("qwen2", "multiclass"),
        ("t5", "multiclass"),
    ],
)
def test_packed_padded_and_one_at_a_time_agree(source, kind):
    texts, budget = (TEXTS, 16) if source in ("qwen2", "t5") else (PROTEINS, 128)
    packed = pipeline(source, kind, tokens=budget)
    padded = pipeline(source, kind, tokens=budget, model_settings={"backbone": {"padded": True}})
    alone = one_at_a_time(packed, texts)
    for made in (packed, padded):
        found = made.predict(texts).probabilities
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, alone, rtol=0, atol=1e-5)


@functools.cache
def shared() -> ClassifierPipeline:
    return pipeline()


def test_batches_hold_what_the_budget_allows_the_longest_first(monkeypatch):
    made = pipeline(tokens=100)
    seen = []
    rows = made.model.rows

    def watched(packed, outputs):
        seen.extend(torch.diff(batch.batch.cu_seqlens).tolist() for batch in packed)
        return rows(packed, outputs)

    monkeypatch.setattr(made.model, "rows", watched)
    progress = []
    made.predict(PROTEINS, progress=lambda done, total: progress.append((done, total)))
    assert seen == [[92], [92], [32, 14, 7, 3]]
    assert progress == [(1, 6), (2, 6), (6, 6)]
    found = made.predict([])
    assert found.probabilities.shape == (0, 3) and found.labels() == [] and len(found) == 0


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.05), ("fp16", 0.01)])
def test_half_precision_gives_nearly_the_same_in_fp32_and_keeps_rotary_frequencies(precision, tolerance):
    found = pipeline(precision=precision).predict(PROTEINS).probabilities
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, shared().predict(PROTEINS).probabilities, rtol=0, atol=tolerance)
    buffers = dict(pipeline("qwen2", precision=precision).classifier.named_buffers())
    assert {buffer.dtype for name, buffer in buffers.items() if "inv_freq" in name} == {torch.float32}


def test_an_adapter_is_merged():
    lora = {"backbone": {"lora": {"rank": 4}}}
    model, _ = tiny_classifier(**lora)
    with torch.no_grad():
        batches = [shared().model.input_of([text.encode()]).batch for text in PROTEINS]
        expected = torch.cat(list(map(model.logits, batches))).softmax(-1)
    assert hasattr(model.backbone.model, "peft_config")
    made = pipeline(model_settings=lora)
    assert not hasattr(made.classifier.backbone.model, "peft_config")
    np.testing.assert_allclose(made.predict(PROTEINS).probabilities, expected.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("crop", ["start", "ends"])
def test_longer_texts_are_cropped_and_counted_and_cropped_residues_have_a_question_mark(crop):
    made = pipeline(max_length=20, crop=crop)
    cut = [text if len(text) <= 20 else text[:20] if crop == "start" else text[:10] + text[-10:] for text in PROTEINS]
    found = made.predict(PROTEINS)
    assert found.cropped.tolist() == [10, 0, 70, 0, 70, 0]
    np.testing.assert_allclose(found.probabilities, made.predict(cut).probabilities, rtol=0, atol=1e-5)
    found = pipeline(kind="per_residue", max_length=21, crop=crop).predict(PROTEINS)
    letters = found.labels()
    assert [len(one) for one in letters] == [len(text) for text in PROTEINS]
    assert found.probabilities.shape == (21 + 1 + 21 + 12 + 21 + 5, 3)
    assert letters[0][11:20] == "?" * 9 if crop == "ends" else letters[0][21:] == "?" * 9
    likeliest = found.probabilities.argmax(-1)
    assert "".join(letters).replace("?", "") == "".join("CEH"[index] for index in likeliest)


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


def test_out_of_memory_halves_a_batch_and_names_a_single_text(monkeypatch):
    made = pipeline(tokens=100)
    wanted, logits = made.predict(PROTEINS).probabilities, made.classifier.logits
    most = 92

    def limited(batch):
        if batch.num_tokens > most or batch.num_sequences > 2:
            raise torch.OutOfMemoryError("no")
        return logits(batch)

    monkeypatch.setattr(made.classifier, "logits", limited)
    np.testing.assert_allclose(made.predict(PROTEINS).probabilities, wanted, rtol=0, atol=1e-5)
    most = 40
    with pytest.raises(ResourceError, match=r"sequence 3 of 92 tokens: out of memory on a single sequence \(no\)"):
        made.predict(PROTEINS)


def test_a_run_is_as_good_as_its_export(tmp_path):
    folder = export_tiny(tmp_path / "run" / "export", classifier_config(max_length=20, crop="ends"))
    assert exported_by("classifier", tmp_path / "run") == exported_by("classifier", folder) == folder
    made = ClassifierPipeline.load(tmp_path / "run", device="cpu")
    assert (made.max_length, made.crop) == (20, "ends")
    expected = pipeline(max_length=20, crop="ends").predict(PROTEINS).probabilities
    np.testing.assert_array_equal(made.predict(PROTEINS).probabilities, expected)
    config = config_of(folder, {("data", "max_length"): "10"})
    assert ClassifierPipeline.load(folder, data=config.data, device="cpu").max_length == 10


def test_a_folder_without_a_classifier_or_a_device_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no exported model; .*classifier.*train export"):
        ClassifierPipeline.load(tmp_path)
    with pytest.raises(ConfigError, match="no folder"):
        ClassifierPipeline.load(tmp_path / "absent")
    folder = export_tiny(tmp_path / "model")
    for device, message in (("cuda:99", "torch sees . CUDA devices"), ("gpu", "none of this name")):
        with pytest.raises(ConfigError, match=message):
            ClassifierPipeline.load(folder, device=device)
