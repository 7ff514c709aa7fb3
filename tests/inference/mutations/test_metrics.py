import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import matthews_corrcoef, ndcg_score, roc_auc_score

from esmeray.common.errors import DataError
from esmeray.inference.mutations.metrics import evaluation_of, mutation_metrics


def reference(scores: np.ndarray, measured: np.ndarray) -> dict[str, float]:
    """ProteinGym's metrics, computed with scikit-learn and scipy."""
    good, predicted = measured >= np.median(measured), scores >= np.median(scores)
    top, best = (values >= np.percentile(values, 90) for values in (measured, scores))
    gains = (measured - measured.min()) / np.ptp(measured)
    return {
        "spearman": spearmanr(scores, measured).statistic,
        "top_10_recall": (top & best).sum() / top.sum(),
        "ndcg": ndcg_score([gains], [scores], k=len(scores) // 10, ignore_ties=True),
        "auroc": roc_auc_score(good, scores),
        "mcc": matthews_corrcoef(good, predicted),
    }


def test_metrics_are_those_of_proteingym():
    random = np.random.default_rng(0)
    measured = random.normal(size=157).round(1)
    scores = measured + random.normal(size=157)
    metrics = mutation_metrics(scores, measured)
    assert metrics(np.ones(157, dtype=np.int64)) == pytest.approx(reference(scores, measured))
    counts = random.integers(3, size=157)
    found, drawn = metrics(counts), np.repeat(np.arange(157), counts)
    wanted = reference(scores[drawn], measured[drawn])
    for name in ("spearman", "top_10_recall", "ndcg"):  # the other metrics use the medians of all mutants
        assert found[name] == pytest.approx(wanted[name])


def test_an_evaluation_is_of_the_mutants_that_have_all_values():
    measured = np.append(np.random.default_rng(0).normal(size=60), np.nan)
    scores = np.append(measured[:-1] ** 3, 4.0)
    other = np.where(np.arange(61) < 3, np.nan, -measured)
    found = evaluation_of({"model": scores, "other": other}, measured, samples=50)
    assert (found["records"], found["without_target"]) == (61, 4)
    assert found["metrics"] == pytest.approx({"spearman": 1, "top_10_recall": 1, "ndcg": 1, "auroc": 1, "mcc": 1})
    assert found["baselines"]["other"]["metrics"]["spearman"] == pytest.approx(-1)
    low, high = found["baselines"]["other"]["intervals"]["ndcg"]
    assert 0 <= low <= found["baselines"]["other"]["metrics"]["ndcg"] <= high <= 1
    with pytest.raises(DataError, match="nothing can be evaluated"):
        evaluation_of({"model": scores}, np.full(61, np.nan), samples=5)
