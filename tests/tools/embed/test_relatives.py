"""Homology metrics equal values computed by hand, and conformal thresholds hold on exchangeable queries."""

import json
from pathlib import Path

import numpy as np
import pytest

from esmeray.common.errors import DataError
from esmeray.dataset.embeddings.reader import open_vectors
from esmeray.inference.index.build import memory_index
from esmeray.inference.retrieval.conformal import Calibration, calibrate, calibrated
from tests.embeddings import make_embeddings, random_vectors

LABELS = {
    "q": "a.1.1.1",
    "family1": "a.1.1.1",
    "family2": "a.1.1.1",
    "superfamily1": "a.1.1.2",
    "superfamily2": "a.1.1.3",
    "fold1": "a.1.2.1",
    "foreign1": "a.2.1.1",
    "foreign2": "b.1.1.1",
    "foreign3": "b.1.1.1",
    "foreign4": "c.1.1.1",
}
RANKED = ["q", "family1", "superfamily1", "fold1", "foreign1", "family2", "foreign2", "superfamily2", "foreign3"]
"""Hits of the query q, in order; foreign4 is missing."""


@pytest.fixture
def labels(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{name}\t{label}\n" for name, label in LABELS.items())
    Path("labels.tsv").write_text(f"id\tlabel\n{rows}")
    Path("queries.txt").write_text("q\n")
    return tmp_path


def evaluated(command, source: str) -> dict:
    command.done(
        f"embed evaluate {source} --evaluate.labels labels.tsv --evaluate.level_names family superfamily fold "
        "--evaluate.queries queries.txt --evaluate.output result.json --overwrite"
    )
    levels = json.loads(Path("result.json").read_text())["levels"]
    return {level: {name: metric["value"] for name, metric in metrics.items()} for level, metrics in levels.items()}


def test_hits_are_counted_as_progres_counts_them(command, labels):
    """Before foreign1: 2 of 3 in the family (q and family1), 1 of 2 in the superfamily, and 1 of 1 in the fold."""
    Path("hits.tsv").write_text("".join(f"q\t{target}\t90.0\n" for target in RANKED))
    levels = evaluated(command, "hits.tsv")
    assert levels["family"]["sensitivity"] == pytest.approx(2 / 3)
    assert levels["family"]["sensitivity_of_others"] == pytest.approx(1 / 2)
    assert levels["superfamily"]["sensitivity"] == pytest.approx(1 / 2)
    assert levels["fold"]["sensitivity"] == 1
    # family1 ranks before all four foreign sequences, family2 before three, superfamily2 before two.
    assert levels["family"]["auc"] == pytest.approx((4 + 3) / 8)
    assert levels["superfamily"]["auc"] == pytest.approx((4 + 2) / 8)
    assert levels["family"]["top_1"] == levels["fold"]["top_5"] == 1
    Path("hits.tsv").write_text("q\tforeign1\nq\tfamily1\n")
    levels = evaluated(command, "hits.tsv")
    assert levels["family"]["sensitivity"] == pytest.approx(1 / 3), "itself, by definition"
    # family1 ranks before the three foreign sequences that are not in the list; family2 is tied with them.
    assert levels["family"]["auc"] == pytest.approx((3 + 3 / 2) / 8)
    assert (levels["family"]["top_1"], levels["family"]["top_5"]) == (0, 1)


def test_queries_are_the_distinct_ids_of_a_file(command, labels):
    fitted_vectors(labels / "vectors", [])
    evaluate = "embed evaluate vectors --evaluate.labels labels.tsv --evaluate.queries queries.txt"
    Path("queries.txt").write_text("q\nfamily1\n\nq\n")
    assert "2 queries among 9 with a label" in command.done(evaluate).out
    for text, words in ("\n", "has no ids"), ("q\nnobody\n", "line 2"):
        Path("queries.txt").write_text(text)
        command.refused(3, words, evaluate)


def made_up(random: np.random.Generator, queries: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Simulated hits of queries with many or no relatives, near or far; true hits have higher scores on average."""
    hits = []
    for _ in range(queries):
        is_false_K = random.random(10) < random.random()
        scores_K = random.normal(np.where(is_false_K, 0.0, 1.5)).round(2) + random.normal() / 2
        order = np.argsort(-scores_K)
        hits.append((scores_K[order], is_false_K[order]))
    return hits


def test_false_share_of_exchangeable_queries_is_at_most_the_rate():
    random = np.random.default_rng(0)
    shares, kept, p_values = [], [], []
    for _ in range(200):
        calibration = calibrate(made_up(random, 60), 0.2)
        for scores_K, is_false_K in made_up(random, 10):
            reached_K = scores_K >= calibration.threshold
            shares.append((is_false_K & reached_K).sum() / max(1, reached_K.sum()))
            kept.append(reached_K.mean())
            p_values.append(float(calibration.p_values(scores_K[is_false_K].max(initial=-np.inf))))
    # The mean over 2,000 queries has a standard error below 0.01.
    assert np.mean(shares) <= 0.2 + 0.02 and np.mean(kept) > 0.1
    assert (np.array(p_values) <= 0.1).mean() <= 0.1 + 0.02


def test_threshold_is_the_lowest_that_keeps_the_rate():
    hits = [(np.array([0.9, 0.5, 0.4, 0.1]), np.array([False, False, True, True]))] * 9
    # Nine shares of 1/3 and one of 1 have the mean 0.4; with the last hit, nine of 1/2 give 0.55.
    assert calibrate(hits, 0.4).threshold == 0.4
    assert calibrate(hits, 0.39).threshold == 0.5
    assert calibrate(hits, 0.09).threshold == np.inf
    p_values = Calibration(0.0, np.array([0.2, 0.4, 0.4])).p_values(np.array([0.5, 0.4, 0.3]))
    assert p_values.tolist() == [0.25, 0.75, 0.75]


def test_search_keeps_hits_above_the_calibrated_threshold(command, labels):
    random = np.random.default_rng(1)
    names = [f"p{number}" for number in range(60)]
    centres = random.normal(size=(6, 8))
    # Two groups are near each other, so some nearest hits are false.
    centres[1] = centres[0] + 0.3 * random.normal(size=8)
    vectors = (np.repeat(centres, 10, axis=0) + 0.4 * random.normal(size=(60, 8))).astype(np.float32)
    make_embeddings(labels / "vectors", vectors, names)
    Path("groups.tsv").write_text("id\tlabel\n" + "".join(f"p{n}\tx.{n // 10}\n" for n in range(60)))
    Path("known.txt").write_text("\n".join(names[::2]))
    options = "--search.calibration groups.tsv --search.calibration_queries known.txt"
    done = command.done(f"embed search vectors --search.output hits.tsv --search.error_rate 0.15 {options}")
    index = memory_index(open_vectors(labels / "vectors"), "cosine")
    given = index, Path("groups.tsv"), "label", 0.15
    calibration = calibrated(*given, 0, Path("known.txt"), 10)
    assert f"{calibration.threshold:.6g}" in done.out
    header, *rows = [line.split("\t") for line in Path("hits.tsv").read_text().splitlines()]
    assert header[-2:] == ["score", "p_value"] and 0 < len(rows) < 600
    assert min(float(row[3]) for row in rows) >= calibration.threshold - 1e-6
    assert calibrated(*given, 1, None, 10).threshold < calibration.threshold, "no hit is false any more"
    Path("known.txt").write_text("p1\np2\n")
    with pytest.raises(DataError, match="at least 6"):
        calibrated(*given, 0, Path("known.txt"), 10)
    command.refused(2, "need each other", "embed search vectors --search.output h.tsv --search.error_rate 0.1")


def fitted_vectors(folder: Path, learnt: list[str]) -> Path:
    """Write vectors whose hits have the order of RANKED; the model was fitted to ``learnt`` and two other sequences."""
    angles = [number / 10 for number in range(len(RANKED))]
    sequences = {name: "MK" + "A" * number for number, name in enumerate(RANKED)}
    return make_embeddings(
        folder,
        np.array([[np.cos(angle), np.sin(angle)] for angle in angles], dtype=np.float32),
        RANKED,
        sequences=[*sequences.values()],
        learnt=[*(sequences[name] for name in learnt), "MWW", "MYY"],
    )


def test_metrics_are_given_with_and_without_the_proteins_of_the_training(command, labels):
    fitted_vectors(labels / "vectors", ["family1", "foreign1"])
    assert evaluated(command, "vectors")["family"]["sensitivity"] == pytest.approx(2 / 3)
    result = json.loads(Path("result.json").read_text())
    # Without foreign1, family2 is the first hit; without family1, it is the only family member.
    assert result["proteins_in_training"] == 2
    assert result["levels_without_training"]["family"]["sensitivity"]["value"] == 1
    evaluate = "embed evaluate vectors --evaluate.labels labels.tsv --overwrite"
    done = command.done(evaluate)
    assert "2 of 9 proteins were in the training data of the fitted model (4 proteins)\nall:\n" in done.out
    assert "\nwithout training proteins:\n" in done.out
    command.done("embed index vectors --index.output index")
    search = "--search.error_rate 0.2 --search.calibration labels.tsv --search.output h.tsv --overwrite"
    thresholds = set()
    for database in ("vectors", "index"):
        done = command.done(f"embed search {database} {search}")
        assert "2 of 9 calibrating proteins were in the training data of the fitted model (4 proteins)" in done.out
        thresholds.add(done.out.split("threshold without them: ")[1].split()[0])
    assert len(thresholds) == 1
    index = memory_index(open_vectors(labels / "vectors"), "cosine")
    Path("others.txt").write_text("\n".join(name for name in RANKED if name not in ("family1", "foreign1")))
    expected = calibrated(index, Path("labels.tsv"), "label", 0.2, 0, Path("others.txt"), 10)
    assert thresholds == {f"{expected.threshold:.6g}"}
    plot = "embed plot vectors --plot.output plot --overwrite"
    assert "2 of 9 proteins were in the training data of the fitted model (4 proteins)" in command.done(plot).out


def test_what_is_not_recorded_of_the_training_is_said(command, labels):
    make_embeddings(labels / "vectors", random_vectors(len(LABELS), 3), list(LABELS))
    calibration = "--search.error_rate 0.2 --search.calibration labels.tsv --search.output h.tsv"
    for words in (
        "embed evaluate vectors --evaluate.labels labels.tsv --evaluate.output result.json",
        f"embed search vectors {calibration}",
        "embed plot vectors --plot.output plot",
    ):
        assert "proteins in the model's training data: not recorded" in command.done(words).out
    assert json.loads(Path("result.json").read_text())["proteins_in_training"] is None


def test_ids_as_databases_write_them_join_with_accessions(command, labels):
    accessions = {name: f"P{number:05}" for number, name in enumerate(LABELS)}
    rows = [f"{accessions[name]}\t{label}\n" for name, label in LABELS.items()]
    Path("labels.tsv").write_text("".join(["id\tlabel\n", *rows, "P99998\tNA\n", "P99999\t\n"]))
    Path("queries.txt").write_text(f"{accessions['q']}.2\n")
    angles = {accessions[name]: number / 10 for number, name in enumerate([*RANKED, "foreign4"])}
    angles |= {"P99998": 0.02, "P99999": 0.03}
    vectors = np.array([[np.cos(angle), np.sin(angle)] for angle in angles.values()], dtype=np.float32)
    ids = [f"sp|{name}|X_{name}" for name in angles]
    make_embeddings(labels / "vectors", vectors, ids, sequences=["MK"] * len(ids))
    levels = evaluated(command, "vectors")
    assert levels["family"]["sensitivity"] == pytest.approx(2 / 3) and levels["fold"]["sensitivity"] == 1
    command.done("embed search vectors --search.output hits.tsv --search.top_k 20")
    assert evaluated(command, "hits.tsv") == levels
    calibration = "--search.error_rate 0.2 --search.calibration labels.tsv --search.output h.tsv"
    command.done(f"embed search vectors {calibration}")
    plotted = command.done("embed plot vectors --plot.output plot --plot.labels labels.tsv")
    assert "12 proteins, 2 without a label" in plotted.out
    kept = command.done("embed plot vectors --plot.output kept --plot.labels labels.tsv --plot.not_missing NA")
    assert "12 proteins, 1 without a label" in kept.out
    Path("bad.tsv").write_text("id\tlabel\nP00001\ta\n  \tb\n")
    command.refused(
        3, "bad.tsv, row 2: column 'id' is empty; add an id", "embed evaluate vectors --evaluate.labels bad.tsv"
    )
