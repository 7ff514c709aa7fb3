"""Evaluation of function predictions equals cafaeval 1.3 in every number; and metrics that cafaeval lacks."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array, random_array

from benchmarks.stages.function_evaluation import write_files
from esmeray.common.errors import EsmerayError
from esmeray.function.annotations import Annotations, read_annotations, read_scores
from esmeray.function.evaluation import Evaluation, evaluate_functions
from esmeray.function.ontology import Aspect, read_ontology
from esmeray.function.section import EvaluationSection
from tests.function.cases import CASES, EXPECTED, columns, evaluated, read, write_case


def table(found: dict[str, Evaluation]) -> dict[str, dict[str, np.ndarray]]:
    return {name: {"tau": aspect.thresholds, **aspect.curves} for name, aspect in found.items()}


def assert_equal(ours: dict, theirs: dict, tolerance: float = 1e-9) -> None:
    assert set(ours) == set(theirs)
    for aspect, columns_ in theirs.items():
        assert set(columns_) == set(ours[aspect])
        for column, values in columns_.items():
            np.testing.assert_allclose(ours[aspect][column], values, rtol=0, atol=tolerance, err_msg=column)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_generated_ontologies_give_what_cafaeval_gave(tmp_path, number):
    found = table(evaluated(write_case(tmp_path / "case", number)))
    rows = {
        aspect: {name: [values[0], values[len(values) // 2], values[-1]] for name, values in columns_.items()}
        for aspect, columns_ in found.items()
    }
    assert_equal(rows, EXPECTED[number])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ontology", "expected", "orphans"),
    [
        ("cafaeval_example", "cafaeval_example/IDPO_disorder_function.obo", "expected_default", True),
        ("cafaeval_example", "cafaeval_example/IDPO_disorder_function.obo", "expected_no_orphans", False),
        ("cafaeval_blast_mfo", "go_2013-06.obo.gz", "expected", False),
    ],
)
def test_real_predictions_give_what_cafaeval_gave(shared_data, tmp_path, name, ontology, expected, orphans):
    folder = shared_data / "go" / name
    terms = read_ontology(shared_data / "go" / ontology)
    truth = read_annotations(folder / "ground_truth.tsv", terms)
    (aspect,) = truth
    lines = (folder / expected / "evaluation_all.tsv").read_text().splitlines()
    for path in (folder / "predictions").iterdir():
        scores = read_scores(path, terms, {aspect: truth[aspect].proteins}, unknown="ignore")[aspect]
        settings = EvaluationSection(orphans=orphans)
        found = evaluate_functions(terms.aspects[aspect], truth[aspect], scores, settings=settings, draws=0)
        own = [line for line in lines if line.startswith(("filename", path.name.removesuffix(".gz")))]
        (tmp_path / "some.tsv").write_text("\n".join(own))
        assert_equal(table({aspect: found}), columns(tmp_path / "some.tsv"), 5.0001e-4)  # written with three digits


def small(tmp_path: Path) -> tuple[Aspect, Annotations, csr_array]:
    """Largest aspect of a generated case, with its annotations and scores."""
    ontology, truth, scores = read(write_case(tmp_path / "case", 3))
    name = max(truth, key=lambda each: len(truth[each].proteins))
    return ontology.aspects[name], truth[name], scores[name]


def test_intervals_are_those_of_proteins_drawn_again(tmp_path):
    aspect, truth, scores = small(tmp_path)
    found = evaluate_functions(aspect, truth, scores, draws=200)
    random = np.random.default_rng(5)
    values = []
    for _ in range(200):
        drawn = random.integers(len(truth.proteins), size=len(truth.proteins))
        again = Annotations(tuple(map(str, drawn)), truth.terms[drawn])
        values.append(evaluate_functions(aspect, again, scores[drawn], draws=0).metrics)
    for name in ("fmax", "smin", "fmax_micro"):
        low, high = np.percentile([metrics[name].value for metrics in values], [2.5, 97.5])
        assert found.metrics[name].interval == pytest.approx((low, high), abs=0.25 * (high - low))
        assert found.metrics[name].interval[0] <= found.metrics[name].value <= found.metrics[name].interval[1]
    recall_T, precision_T = found.curves["rc"][::-1], found.curves["pr"][::-1]
    area = np.trapezoid([precision_T[0], *precision_T], [0, *recall_T])
    assert found.metrics["aupr"].value == pytest.approx(area, abs=1e-12)


@pytest.mark.parametrize("known", [None, "none"])
def test_areas_of_a_perfect_ranking_are_1_and_of_a_bad_one_less(tmp_path, known):
    aspect, truth, _ = small(tmp_path)
    annotated_NV = truth.terms.toarray()
    nothing = None if known is None else Annotations((), csr_array((0, len(aspect.terms)), dtype=bool))
    for high, low in ((1, 0), (0.9, 0.1), (0.011, 0.001)):
        scores = csr_array(np.where(annotated_NV, high, low).astype(float))
        metrics = evaluate_functions(aspect, truth, scores, known=nothing, draws=20).metrics
        for name in ("aupr", "aupr_micro"):
            assert metrics[name].value == pytest.approx(1)
            assert metrics[name].interval == pytest.approx((1, 1))
    reversed_scores = csr_array(np.where(annotated_NV, 0.1, 0.9))
    assert evaluate_functions(aspect, truth, reversed_scores, draws=0).metrics["aupr_micro"].value < 0.6


WRONG = {
    "scores: input should be an instance of csr_array, got None": lambda scores: None,
    "scores: input should be an instance of csr_array, got array": lambda scores: scores.toarray(),
    "scores: expected values from 0 to 1 for .* proteins by .* terms": lambda scores: scores[:1],
    "scores: expected values from 0 to 1": lambda scores: scores * 90,
    "scores: expected values from 0 to 1 for": lambda scores: scores * np.nan,
}


@pytest.mark.parametrize("words", WRONG)
def test_scores_of_another_kind_are_refused(tmp_path, words):
    aspect, truth, scores = small(tmp_path)
    with pytest.raises(EsmerayError, match=words):
        evaluate_functions(aspect, truth, WRONG[words](scores))


def test_memory_grows_with_the_proteins_and_never_with_proteins_by_terms(tmp_path):
    write_files(tmp_path, 1, 4000)
    (aspect,) = read_ontology(tmp_path / "terms.obo").aspects.values()
    annotated, scores = (random_array((1000, 4000), density=density, rng=0, format="csr") for density in (5e-4, 0.05))
    truth = Annotations(tuple(map(str, range(1000))), (annotated > 0) @ aspect.ancestors)
    aspect.steps  # noqa: B018 - made once
    tracemalloc.start()
    evaluate_functions(aspect, truth, csr_array(scores), draws=20)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1000 * 4000 * 8 / 2
