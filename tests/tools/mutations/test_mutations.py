"""The commands ``mutations score``, ``scan``, ``fit``, ``propose`` and ``campaign``."""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.mutations import proposal
from tests.dataset.tokenizer_folders import esm, prot_t5
from tests.inference.mutations.spellings import NAME_OF
from tests.model.small_models import save_masked_lm, save_small_model
from tests.model.support import random_sequences

pytestmark = pytest.mark.slow

WILD, OTHER = random_sequences([12], seed=0)[0], random_sequences([9], seed=5)[0]
FIRST = 24
HEADER = ("mutant", "score", "zs")
GYM = ("mutant", "DMS_score", "mutated_sequence")
FIT = "--zero_shot_column zs --features one_hot"


def name(place: int, letter: str) -> str:
    return f"{WILD[place]}{place + FIRST}{letter}"


SINGLES = [(place, letter) for place in range(12) for letter in AMINO_ACIDS if letter != WILD[place]]
MUTANTS = [name(3, "A"), name(11, "W"), f"{name(0, 'C')}:{name(7, 'D')}", name(5, WILD[5]), name(3, "A").lower()]
BAD = ["", name(2, "*"), f"{'A' if WILD[2] != 'A' else 'C'}26G", f"{WILD[0]}90G", "G26"]
WHOLE = [WILD[:3] + "A" + WILD[4:], WILD[:5] + WILD[6:]]
GROUPED = [(name(*pair), n % 7, n % 5, f"g{n % 24}") for n, pair in enumerate(SINGLES[::2])]
TABLES = {
    "mutants.csv": [("mutant",), *((text,) for text in MUTANTS)],
    "whole.csv": [("protein",), *((text,) for text in WHOLE)],
    "bad.csv": [("mutant",), (MUTANTS[0],), *((text,) for text in BAD)],
    "text.csv": [("mutant", "measured"), (MUTANTS[0], "high")],
    "scored.csv": [("mutant", "score", "model_score"), (MUTANTS[0], 1, 1)],
    "shifted.csv": [("mutant",), *((f"{WILD[place]}{place + 1}W",) for place in (0, 1, 5)), ("wt",)],
    "missing.csv": [("seq", "score"), (WILD, 1), ("NaN", 2), ("NA", 3), ("null", 4)],
    "named.csv": [("protein", "mutant"), ("c", MUTANTS[0])],
    "few.csv": [HEADER, *((name(*pair), value, 1) for pair, value in zip(SINGLES, (1, "", 2), strict=False))],
    "grouped.csv": [(*HEADER, "cluster"), *GROUPED],
    "two_groups.csv": [(*HEADER, "cluster"), *GROUPED, (GROUPED[0][0].lower(), 1, 1, "other")],
    "no_group.csv": [(*HEADER, "cluster"), *GROUPED[1:], (*GROUPED[0][:3], "NA")],
}


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory) -> Iterator[Path]:
    """The current folder, with models, wild types and tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("mutations"))
        for number in range(2):
            save_masked_lm(esm(Path(f"model{number}")), "esm", vocab_size=33, seed=number)
        save_small_model(prot_t5(Path("headless")), "t5", vocab_size=140)
        Path("wild.fasta").write_text(f">wild\n{WILD}\n")
        Path("both.fasta").write_text(f">a\n{WILD}\n>b\n{OTHER}\n")
        for table, rows in TABLES.items():
            write(table, rows[1:], *rows[0])
        yield Path()


def write(path: str, rows: list[tuple[object, ...]], *header: str) -> None:
    with Path(path).open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def read(path: str) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def evaluation_of(folder: str) -> dict:
    return json.loads(Path(folder, "evaluation.json").read_text())


@pytest.fixture
def mutations(command, capsys):
    """Function that calls a subcommand on a model with the common settings."""

    def call(subcommand: str, model: str, *options: object, refused: tuple[int, str] | None = None):
        capsys.readouterr()  # of saving models
        words = re.sub(r"--(?!overwrite)", f"--{subcommand}.", " ".join(map(str, options)))
        own = f"--{subcommand}.sequence wild.fasta --{subcommand}.first_position {FIRST} --{subcommand}.precision fp32"
        line = f"mutations {subcommand} {model} {'' if subcommand in ('propose', 'campaign') else own} {words}"
        return command.done(line) if refused is None else command.refused(*refused, line)

    return call


def test_each_row_keeps_its_order_and_gets_a_score(mutations):
    outcome = mutations("score", "model0", "--table mutants.csv --output scores.csv")
    found = read("scores.csv")
    assert [row["mutant"] for row in found] == MUTANTS and list(found[0]) == ["mutant", "score"]
    assert float(found[3]["score"]) == 0 and found[0]["score"] == found[4]["score"] != found[1]["score"]
    assert "4 mutants of 5 rows (masked)" in outcome.out and not [*Path().glob("*.partial")]
    counts = "row in lower case", "row of the wild type (including synonymous mutations)", "duplicate, computed once"
    assert all(f"  1 {line}\n" in outcome.out for line in counts)
    mutations(
        "score", "model0", "--table whole.csv --sequence_column protein --output whole_scores.csv --method pseudo"
    )
    assert [row["protein"] for row in read("whole_scores.csv")] == WHOLE


def test_several_models_are_averaged_and_compared_with_other_scores(mutations):
    values = np.random.default_rng(0).normal(size=(len(SINGLES), 2))
    rows = [(name(*pair), *row) for pair, row in zip(SINGLES, values, strict=True)]
    write("measured.csv", [*rows, (MUTANTS[2], "", "")], "mutant", "score", "other")
    options = "--table measured.csv --measured_column score --compare other --more_models model1"
    outcome = mutations("score", "model0", options, "--output scores.parquet")
    table = pq.read_table("scores.parquet").to_pydict()
    assert [*table] == ["mutant", "score", "other", "model_score", "model_score_1", "model_score_2"]
    np.testing.assert_allclose(table["model_score"], np.mean([table["model_score_1"], table["model_score_2"]], axis=0))
    assert table["score"][-1] is None and table["score"][0] == rows[0][1]
    (line,) = (line for line in outcome.out.splitlines() if line.startswith("| spearman"))
    assert line.count("[") == 2 and "| metric        | model" in outcome.out


@pytest.mark.parametrize(
    ("subcommand", "options", "code", "words"),
    [
        ("score model0", "--table mutants.csv --output mutants.csv", 2, "already exists"),
        ("score model0", "--table whole.csv --sequence_column protein", 3, "can't score insertions and deletions; use"),
        ("score model0", "--table bad.csv", 3, f"row 2, {BAD[0]!r}: "),
        ("score model0", "--table bad.csv", 3, "or give --score.bad_mutants empty"),
        ("score model0", "--table mutants.csv --output s.txt", 2, "--score.output s.txt: must end in .csv or .tsv"),
        ("score model0", "--table mutants.csv --sequence both.fasta", 3, "mutants.csv: no column 'protein'"),
        ("score model0", "--table named.csv --sequence both.fasta", 3, "named.csv, row 1: no wild type is named 'c'"),
        ("score model0", "--table text.csv --measured_column measured", 3, "column 'measured': 'high' is not a number"),
        ("score model0", "--table scored.csv", 2, "scored.csv: already has columns score and model_score"),
        ("score model0", "--table shifted.csv", 3, f"row 1, '{WILD[0]}1W'"),
        ("score model0", "--table missing.csv --sequence_column seq", 3, "row 2: the sequence is empty"),
        ("score headless", "--table mutants.csv", 2, "is not a masked language model with one token per residue"),
        ("score esm2_t6_8M", "--table mutants.csv", 2, "model size, not a checkpoint; give"),
        ("fit model0", f"--table few.csv {FIT}", 3, "few.csv: only 2 mutants have values in all columns; give at lea"),
        ("fit", "--table grouped.csv --features one_hot", 2, "missing: MODEL; give a model, or set features one_hot"),
        ("fit", f"--table grouped.csv --groups cluster --folds modulo {FIT}", 2, "folds modulo: would split groups"),
        ("fit", f"--table two_groups.csv --groups cluster {FIT}", 3, f"{GROUPED[0][0]} has the groups 'g0', 'other';"),
        ("fit", f"--table no_group.csv --groups cluster {FIT}", 3, f"{GROUPED[0][0]} has the groups ''; give all its"),
        ("propose model0", "", 2, "model0: is not a fitted model; fit one with 'esmeray"),
        ("campaign model0", "", 2, "model0: is not a fitted model; fit one with 'esmeray"),
        *(("propose model0", f"--exclude_{wrong}", 2, "exclude_") for wrong in ("positions 3-", "residues BZ")),
    ],
)
def test_wrong_tables_models_and_settings_are_refused(mutations, subcommand, options, code, words):
    mutations(*subcommand.split(), *[""] * (subcommand == "fit"), "--output no.csv", options, refused=(code, words))
    assert not Path("no.csv").exists() and not [*Path().glob("*.partial")]


@pytest.mark.parametrize(
    ("options", "count", "kind", "is_scored"),
    [
        ("--table bad.csv", 5, "", [True, *([False] * 5)]),
        ("--table shifted.csv", 3, ": every mutant would match with --score.first_position 1", [False] * 3 + [True]),
        ("--table missing.csv --sequence_column seq --method pseudo", 3, ": missing", [True, False, False, False]),
    ],
)
def test_bad_mutants_have_an_empty_score_on_request(mutations, options, count, kind, is_scored):
    outcome = mutations("score", "model0", options, "--output bad_scores.csv --bad_mutants empty --overwrite")
    assert f"  {count} rows without a score{kind}\n" in outcome.out
    assert [bool(row.get("model_score", row.get("score"))) for row in read("bad_scores.csv")] == is_scored


def test_a_scan_has_the_scores_of_all_singles_and_a_picture(mutations):
    mutations("scan", "model0", "--output scan")
    rows = read("scan/mutants.csv")
    assert len(rows) == 12 * 19 and [row["position"] for row in rows[::19]] == [str(n + FIRST) for n in range(12)]
    write("singles.csv", [(row["mutant"], 0) for row in rows], "mutant", "my score")
    mutations("score", "model0", "--table singles.csv --output single_scores.csv")
    assert [row["score"] for row in rows] == [row["score"] for row in read("single_scores.csv")]
    assert Path("scan/heat_map.png").exists()
    mutations("scan", "model0", "--output scan --overwrite --method wild_type")
    assert read("scan/mutants.csv") != rows


def test_a_fitted_model_is_evaluated_and_predicts(mutations):
    mutations("scan", "model1", "--output learnt")  # its scores are the values to learn
    rows = [(row["mutant"], row["score"]) for row in read("learnt/mutants.csv")]
    write("half.csv", [*rows[::2], (rows[1][0], "")], "mutant", "score")
    save_masked_lm(esm(Path("changing")), "esm", vocab_size=33, seed=0)
    outcome = mutations("fit", "changing", "--table half.csv --output by_model --sizes 60")
    assert "features of 114 mutants: embeddings; zero-shot scores by changing (masked)\n" in outcome.out
    assert outcome.out.count("## Folds") == 6 and "## Folds contiguous, 60 training mutants" in outcome.out
    evaluation = evaluation_of("by_model")["Folds random, all training mutants"]
    baselines = evaluation["baselines"]
    assert evaluation["records"] == 114 and [*baselines] == ["zero-shot score", "ridge on one-hot"]
    assert evaluation["metrics"]["spearman"] > baselines["zero-shot score"]["metrics"]["spearman"]
    assert Path("by_model/learning_curve.png").exists()
    write("rest.csv", rows[1::2], "mutant", "measured")
    mutations("score", "by_model", "--table rest.csv --measured_column measured --output predicted.csv")
    predicted = read("predicted.csv")
    pairs = np.array([(row["measured"], row["score"]) for row in predicted], float)
    assert all(float(row["score_low"]) < float(row["score"]) < float(row["score_high"]) for row in predicted)
    assert np.corrcoef(pairs.T)[0, 1] > 0.5
    mutations("scan", "by_model", "--output predicted")
    scanned = {row["mutant"]: float(row["score"]) for row in read("predicted/mutants.csv")}
    np.testing.assert_allclose([scanned[row["mutant"]] for row in predicted], pairs[:, 1], rtol=1e-5, atol=1e-6)
    mutations("propose", "by_model", f"--output next.csv --number 5 --exclude_positions {FIRST + 2}-{FIRST + 11}")
    assert not {row["mutant"] for row in read("next.csv")} & {text for text, _ in rows[::2]}
    write("named_b.csv", [("b", f"{FIRST + 1}C")], "protein", "mutant")
    other = (3, "was fitted to mutants of another protein")
    mutations("score", "by_model", "--sequence both.fasta --table named_b.csv --output no.csv", refused=other)
    save_masked_lm(Path("changing"), "esm", vocab_size=33, seed=5)
    changed = (3, "changing: its weights have changed since the fit; fit again")
    mutations("score", "by_model", "--table rest.csv --output no.csv", refused=changed)


def test_several_proteins_share_a_command_and_its_metrics(mutations):
    Path("assays").mkdir()
    random, rows, wild_types = np.random.default_rng(0), [], {"a": WILD, "b": OTHER}
    for protein, wild in wild_types.items():
        pairs = [(n, letter) for n in range(len(wild)) for letter in AMINO_ACIDS[::3] if letter != wild[n]]
        own = [(f"{wild[n]}{n + FIRST}{letter}", random.normal()) for n, letter in pairs]
        rows += [(protein, *row) for row in own]
        whole = [wild[:n] + letter + wild[n + 1 :] for n, letter in pairs]
        write(f"assays/{protein}.csv", [(*row, text) for row, text in zip(own, whole, strict=True)], *GYM)
    write("both.csv", rows, "protein", "mutant", "DMS_score")
    options = "--measured_column DMS_score"
    outcome = mutations("score", "model0", "--table both.csv --sequence both.fasta --output both_scores.csv", options)
    found = read("both_scores.csv")
    assert [(row["protein"], row["mutant"]) for row in found] == [row[:2] for row in rows]
    assert [line.split()[1] for line in outcome.out.splitlines() if line.startswith("| ")][2:] == ["a", "b", "mean"]
    # ProteinGym's tables need no FASTA file: they have whole sequences.
    mutations("score", "model0", "--table assays --sequence none --output gym.csv", options)
    gym = read("gym.csv")
    assert [{key: row[key] for key in found[0]} for row in gym] == found
    assert [row["mutated_sequence"] for row in gym][-len(whole) :] == whole  # all columns are kept
    write("a.csv", [row[1:2] for row in rows if row[0] == "a"], "mutant")
    mutations("score", "model0", "--table a.csv --output a_scores.csv")
    ours = [float(row["score"]) for row in found if row["protein"] == "a"]
    np.testing.assert_allclose(ours, [float(row["score"]) for row in read("a_scores.csv")], atol=1e-5)
    mutations("scan", "model0", "--sequence both.fasta --output scans --method wild_type")
    assert {path.name for path in Path("scans").glob("*.png")} == {"heat_map_1.png", "heat_map_2.png"}
    Path("ids.fasta").write_text(f">sp|P12345|A_HUMAN\n{WILD}\n>sp|P12346|B_HUMAN\n{OTHER}\n")
    ids = {"a": "P12345", "b": "P12346.1"}
    # An unnamed index, as written by pandas, is a column, too.
    write("ids.csv", [(n, ids[protein], text) for n, (protein, text, _) in enumerate(rows)], "", "protein", "mutant")
    mutations("score", "model0", "--table ids.csv --sequence ids.fasta --output ids_scores.csv")
    scored = [(row[""], row["score"]) for row in read("ids_scores.csv")]
    assert scored == [(str(n), row["score"]) for n, row in enumerate(found)]
    # The wild type is found even if the first row does not show it.
    write("assays/a.csv", [(name(0, "*"), 0, ""), (name(1, "W"), 1, WILD[0] + "W" + WILD[2:])], *GYM)
    outcome = mutations("score", "model0", "--table assays --sequence none --output stops.csv", options)
    assert "  1 row without a score: a stop\n" in outcome.out
    write("assays/a.csv", [row[1:] for row in rows if row[0] == "a"], *GYM[:2])
    fit = "--features one_hot --folds rest --sizes 20 --measured_column DMS_score"
    outcome = mutations("fit", "model0", "--table assays --sequence both.fasta --output by_both", fit)
    assert [*evaluation_of("by_both")["Folds rest, 20 training mutants"]] == ["a", "b"] and "| mean " in outcome.out
    mutations("score", "by_both", "--table both.csv --sequence both.fasta --output both_predicted.csv")
    assert all(float(row["score_low"]) < float(row["score_high"]) for row in read("both_predicted.csv"))
    mutations("propose", "by_both", "--output no.csv", refused=(2, "propose.protein None: give one of a, b"))
    mutations("propose", "by_both", "--output next_b.csv --protein b --number 3")
    assert [row["protein"] for row in read("next_b.csv")] == ["b"] * 3


def test_a_column_replaces_a_model_and_a_proposed_plate_is_new(mutations, monkeypatch):
    monkeypatch.setitem(proposal._COMBINATIONS, "one_hot", 2_000)
    random = np.random.default_rng(0)
    effects = [random.normal() + (place == 4) for place, _ in SINGLES]
    # The column has all singles; every third is measured.
    table = [
        (name(*pair), "" if n % 3 else effect, effect + random.normal())
        for n, (pair, effect) in enumerate(zip(SINGLES, effects, strict=True))
    ]
    write("third.csv", table, *HEADER)
    outcome = mutations("fit", "", "--table third.csv --output by_column --folds rest", FIT)
    assert f"  {len(table) - 76} mutants without a value in column 'score' left out\n" in outcome.out
    mutations("score", "by_column", "--table third.csv --compare zs --output out.csv")
    column = (2, "by --score.compare zs")
    mutations("score", "by_column", "--table mutants.csv --output no.csv", refused=column)
    options = f"--number 24 --mutations 3 --exclude_positions {FIRST + 2} {FIRST + 6}-{FIRST + 7} --exclude_residues CP"
    unmeasured = {text for text, value, _ in table if value == ""}
    for strategy in ("ei", "ucb", "thompson"):
        mutations("propose", "by_column", f"--output {strategy}.csv --strategy {strategy}", options)
        plate = read(f"{strategy}.csv")
        proposed = [row["mutant"] for row in plate]
        assert [*plate[0]][:3] == [*HEADER] and len({*proposed}) == 24
        assert {text for text in proposed if ":" not in text} <= unmeasured and any(":" in text for text in proposed)
        parts = [part for text in proposed for part in text.split(":")]
        assert {int(part[1:-1]) - FIRST for part in parts}.isdisjoint({2, 6, 7})
        assert {part[-1] for part in parts}.isdisjoint("CP")
    write("plate.csv", [(row["mutant"], 1.0, row["zs"]) for row in plate], *HEADER)
    mutations("fit", "nowhere/at_all", "--table third.csv plate.csv --output again --folds rest", FIT)
    mutations("propose", "again", f"--output listed.csv --candidates listed {options}")
    assert {row["mutant"] for row in read("listed.csv")} <= unmeasured


def test_a_campaign_finds_more_than_chance(mutations, monkeypatch):
    monkeypatch.setattr("esmeray.inference.mutations.campaign.TOP_SHARE", 0.1)
    random = np.random.default_rng(0)
    by_position = random.normal(size=12)
    values = [by_position[place] + 0.3 * random.normal() for place, _ in SINGLES]
    rows = [(name(*pair), value, value + random.normal()) for pair, value in zip(SINGLES, values, strict=True)]
    write("assay.csv", rows, *HEADER)
    mutations("fit", "", "--table assay.csv --output by_assay --folds random", FIT)
    outcome = mutations("campaign", "by_assay", "--output campaign --rounds 3 --number 20")
    found = {(row["way"], row["round"]): float(row["found"]) for row in read("campaign/campaign.csv")}
    assert len(found) == 3 * 3 and found["random", "3"] == pytest.approx(60 / len(rows))
    assert found["proposals", "3"] > max(2 * found["random", "3"], 0.6) and "| proposals" in outcome.out
    assert Path("campaign/campaign.png").exists()


def noise(replicates: int, seed: int = 0) -> list[tuple[str, float, float]]:
    """Single mutants with random values, repeated as replicates."""
    random = np.random.default_rng(seed)
    rows = [(name(*pair), *random.normal(size=2)) for pair in SINGLES[::2]]
    return [(text, value + 0.01 * random.normal(), zs) for text, value, zs in rows for _ in range(replicates)]


def respelled(text: str, number: int) -> str:
    """A single mutant in another notation."""
    position = text[1:-1]
    other = name(*((0, WILD[0]) if position != str(FIRST) else (1, WILD[1])))
    spellings = [text, text.lower(), f"p.{NAME_OF[text[0]]}{position}{NAME_OF[text[-1]]}", f"{text}:{other}"]
    return spellings[number % len(spellings)]


def test_replicates_are_one_mutant_in_folds_sizes_plates_and_files(mutations):
    rows = noise(3)
    for number, half in enumerate((rows[::2], rows[1::2]), 1):
        write(f"plate{number}.csv", [(respelled(text, n), *rest) for n, (text, *rest) in enumerate(half)], *HEADER)
    tables = "--table plate1.csv plate2.csv"
    outcome = mutations("fit", "", tables, "--output by_plates --folds random rest --sizes 40", FIT)
    size = len(rows) // 3
    assert f"features of {size} mutants" in outcome.out and f"  {len(rows)} measurements, averaged" in outcome.out
    evaluation = evaluation_of("by_plates")
    # Equal to a fit on one measurement per mutant, also in interval widths: all were measured equally often.
    means = {text: np.mean([value for other, value, _ in rows if other == text]) for text, *_ in rows}
    write("once.csv", [(text, means[text], zs) for text, _, zs in rows[::3]], *HEADER)
    mutations("fit", "", "--table once.csv --output by_means --folds random rest --sizes 40", FIT)
    once = evaluation_of("by_means")
    assert len(once) == 3
    for key, part in once.items():
        assert evaluation[key]["records"] == size and abs(part["metrics"]["spearman"]) < 0.3, key
        assert part["metrics"] == pytest.approx(evaluation[key]["metrics"], abs=0.02), key
    mutations("campaign", "by_plates", f"--output plates --rounds 2 --number {size // 2 + 1}")
    found = [float(row["found"]) for row in read("plates/campaign.csv") if row["round"] == "2"]
    assert {*found} == {1.0}, "two plates of half of the mutants have them all"
    mutations("score", "model0", tables, "--measured_column score --output all_rows.csv --method wild_type")
    assert len(read("all_rows.csv")) == len(rows)


def test_a_group_is_on_one_side_of_every_fold(mutations):
    # All members of a group have the same value: a training member would reveal the others.
    values = np.random.default_rng(1).normal(size=24)
    table = [(text, values[n % 24], values[n % 24], group) for n, (text, *_, group) in enumerate(GROUPED)]
    write("groups.csv", table, *HEADER, "cluster")
    options = "--groups cluster --sizes 30 --folds random rest"
    mutations("fit", "", "--table groups.csv --output by_groups", options, FIT)
    mutations("propose", "by_groups", "--output combined.csv --number 3 --candidates combinations")
    assert [*read("combined.csv")[0]][:4] == ["mutant", "score", "cluster", "zs"]


def test_tables_of_mavedb_keep_their_columns(mutations):
    wild = [f"{NAME_OF[letter]}{FIRST + n}" for n, letter in enumerate(WILD)]
    texts = f"p.{wild[0]}Trp p.({wild[1]}Trp) p.= _wt p.{wild[2]}Ter p.{wild[3]}del p.{wild[4]}=".split()
    rows = [(f"urn#{n}", "NA", text, n) for n, text in enumerate(texts)]
    write("maved.csv", rows, "accession", "hgvs_nt", "hgvs_pro", "score")
    outcome = mutations("score", "model0", "--table maved.csv --output maved_scores.csv --method wild_type")
    found = read("maved_scores.csv")
    assert [tuple(row.values())[:4] for row in found] == [tuple(map(str, row)) for row in rows]
    assert [row["model_score"] for row in found][2:] == ["0.0", "0.0", "", "", "0.0"]
    for line in (
        "2 rows without a score",
        "1 row without a score: a stop",
        "1 row without a score: a deletion",
        "3 rows of the wild type (including synonymous mutations)",
        "1 column of mutants, detected by name: hgvs_pro",
    ):
        assert f"  {line}\n" in outcome.out


def test_propose_counts_the_mutants_that_were_no_candidates(mutations):
    write("noise.csv", [*noise(1), ("WT", "", "")], *HEADER)
    mutations("fit", "", "--table noise.csv --output by_noise --folds random", FIT)
    options = f"--exclude_positions {FIRST} --exclude_residues y"
    outcome = mutations("propose", "by_noise", "--output excluded.csv", options)
    assert all(":" in row["mutant"] for row in read("excluded.csv"))
    for reason in (
        f"already measured: {WILD[0]}{FIRST}",
        "without a value in column 'zs': ",
        "at excluded positions: ",
        "with excluded residues: ",
    ):
        assert f"single mutants not proposed, {reason}" in outcome.out


def test_files_as_people_have_them_are_read(command, shared_data):
    field = shared_data.parent / "field" / "mutants"
    if not field.is_dir():
        pytest.skip(f"the files of the field are not at {field}")
    for table, kinds in {"hgvs": 1, "wtrows": 3, "comma": 0, "semi": 0, "evolvepro": 0}.items():
        line = f"mutations score model0 --score.sequence {field}/wild_type.fasta --score.table {field}/{table}.csv"
        outcome = command.done(f"{line} --score.output {table}.csv --score.method wild_type")
        assert outcome.out.count("without a score: ") == kinds
        empty = [not row.get("model_score", row.get("score")) for row in read(f"{table}.csv")]
        assert sum(empty) == kinds and len(empty) > 1
    fit = f"--fit.sequence {field}/noise_wild_type.fasta {FIT.replace('--', '--fit.')} --fit.folds random rest"
    for table in ("replicates", "single"):
        command.done(f"mutations fit {fit} --fit.sizes 20 40 --fit.table {field}/{table}.csv --fit.output {table}")
        for part in evaluation_of(table).values():
            assert part["records"] == 80 and abs(part["metrics"]["spearman"]) < 0.25
