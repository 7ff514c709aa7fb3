"""A profile counts what was done, says what did not fit, and leaves a trace that others can open."""

from __future__ import annotations

import pytest

from inference.classifier import ClassifierPipeline
from inference.classifier_profile import measure_batches, measure_whole, spread
from tests.classifiers import tiny_model
from tests.model.support import random_sequences

PROTEINS = random_sequences([30, 5, 12, 50, 9])


@pytest.fixture(scope="module")
def pipeline():
    return ClassifierPipeline(tiny_model())


def test_every_size_is_measured_as_often_as_asked(pipeline):
    results = list(measure_batches(pipeline, PROTEINS, values=[1, 3, 8], warmup_runs=1, runs=4))
    assert [(result.value, len(result.runs)) for result in results] == [(1, 4), (3, 4), (8, 4)]
    for result in results:
        assert result.error is None and all(run.sequences == result.value for run in result.runs)
        summary = result.summary()
        rates = (summary["samples_per_s"], summary["batches_per_s"] * result.value)
        assert rates[0] == pytest.approx(rates[1])
        assert summary["latency_per_batch_ms"]["mean"] == pytest.approx(
            result.value * summary["latency_per_sample_ms"]["mean"]
        )
        assert summary["cpu_memory_peak_mb"] > 10 and summary["gpu_memory_peak_mb"] is None


def test_batches_go_through_the_texts_and_start_again(pipeline):
    (result,) = measure_batches(pipeline, PROTEINS, values=[1], warmup_runs=0, runs=10)
    lengths = [run.longest for run in result.runs]
    assert sorted(lengths[:5]) == sorted(len(text) + 2 for text in PROTEINS) and lengths[:5] == lengths[5:]


def test_token_budgets_are_kept_and_a_longer_text_goes_alone(pipeline):
    results = measure_batches(pipeline, PROTEINS, unit="batch_tokens", values=[20, 60], warmup_runs=0, runs=8)
    for result in results:
        assert all(run.tokens <= result.value or run.sequences == 1 for run in result.runs)
        assert "batch_tokens" in result.summary()


def test_any_other_failure_is_none_of_memory(pipeline, monkeypatch):
    def broken(_):
        raise RuntimeError("shapes")

    monkeypatch.setattr(pipeline.classifier, "logits", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        list(measure_batches(pipeline, PROTEINS, values=[1], warmup_runs=0, runs=1))


def test_the_spread_of_known_values():
    assert spread([3.0]) == {"mean": 3.0, "std": 0.0, "p5": 3.0, "p50": 3.0, "p95": 3.0, "p99": 3.0}
    found = spread([float(value) for value in range(1, 102)])
    assert (found["mean"], found["p50"], found["p95"], found["p99"]) == (51.0, 51.0, 96.0, 100.0)


def test_the_whole_file_is_predicted_as_by_predict(pipeline):
    facts, predictions = measure_whole(pipeline, PROTEINS)
    assert facts["samples"] == 5 and facts["samples_per_s"] == pytest.approx(5 / facts["seconds"])
    assert (predictions.probabilities == pipeline.predict(PROTEINS).probabilities).all()
