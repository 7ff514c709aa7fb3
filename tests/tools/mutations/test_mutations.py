"""The commands ``mutations scan``, ``score``, ``fit`` and ``predict``."""

import csv
import json
import re
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

(WILD,) = random_sequences([12])
FIRST = 24
GYM = ("mutant", "DMS_score", "mutated_sequence")


def name(place: int, letter: str) -> str:
    return f"{WILD[place]}{place + FIRST}{letter}"


MUTANTS = [name(3, "A"), name(11, "W"), f"{name(0, 'C')}:{name(7, 'D')}", name(5, WILD[5]), name(3, "A").lower()]
BAD = ["", name(2, "*"), f"{'A' if WILD[2] != 'A' else 'C'}26G", f"{WILD[0]}90G", "G26"]


@pytest.fixture
def here(tmp_path, monkeypatch, capsys) -> Path:
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        save_masked_lm(esm(tmp_path / f"model{number}"), "esm", vocab_size=33, seed=number)
    (tmp_path / "wild.fasta").write_text(f">wild\n{WILD}\n")
    write("mutants.csv", [(text,) for text in MUTANTS], "mutant")
    capsys.readouterr()  # of saving
    return tmp_path


def write(path: str, rows: list[tuple[object, ...]], *header: str) -> None:
    with Path(path).open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def read(path: str) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def mutations(command, here):
    """Function that calls a subcommand on a model with the common settings."""

    def call(subcommand: str, model: str, *options: object, refused: tuple[int, str] | None = None):
        words = re.sub(r"--(?!overwrite)", f"--{subcommand}.", " ".join(map(str, options)))
        own = f"--{subcommand}.sequence wild.fasta --{subcommand}.first_position {FIRST} --{subcommand}.precision fp32"
        line = f"mutations {subcommand} {model} {'' if subcommand in ('propose', 'campaign') else own} {words}"
        return command.done(line) if refused is None else command.refused(*refused, line)

    return call


def test_a_row_for_each_mutant_in_the_order_of_the_table(mutations):
    outcome = mutations("score", "model0", "--table mutants.csv --output scores.csv")
    found = read("scores.csv")
    assert [row["mutant"] for row in found] == MUTANTS and list(found[0]) == ["mutant", "score"]
    assert float(found[3]["score"]) == 0 and found[0]["score"] == found[4]["score"] != found[1]["score"]
    assert "4 mutants of 5 rows (masked)" in outcome.out and not [*Path().glob("*.partial")]
    for line in (
        "1 row in lower case",
        "1 row of the wild type (including synonymous mutations)",
        "1 duplicate, computed once",
    ):
        assert f"  {line}\n" in outcome.out
    mutations("score", "model0", "--table mutants.csv --output scores.csv", refused=(2, "already exists"))
    whole = [(WILD[:3] + "A" + WILD[4:],), (WILD[:5] + WILD[6:],)]
    write("whole.csv", whole, "protein")
    given = "--table whole.csv --sequence_column protein --output scores.csv --overwrite"
    mutations("score", "model0", given, refused=(3, "method masked: can't score insertions and deletions; use ps"))
    mutations("score", "model0", given, "--method pseudo")
    assert [row["protein"] for row in read("scores.csv")] == [text for (text,) in whole]


def test_several_models_are_averaged_and_evaluated_beside_other_scores(mutations):
    random = np.random.default_rng(0)
    singles = [name(place, letter) for place in range(12) for letter in AMINO_ACIDS if letter != WILD[place]]
    rows = [(text, *random.normal(size=2)) for text in singles]
    write("measured.csv", [*rows, (MUTANTS[2], "", "")], "mutant", "score", "other")
    options = "--table measured.csv --measured_column score --compare other --more_models model1"
    outcome = mutations("score", "model0", options, "--output scores.parquet")
    table = pq.read_table("scores.parquet").to_pydict()
    assert [*table] == ["mutant", "score", "other", "model_score", "model_score_1", "model_score_2"]
    np.testing.assert_allclose(table["model_score"], np.mean([table["model_score_1"], table["model_score_2"]], axis=0))
    assert table["score"][-1] is None and table["score"][0] == rows[0][1]
    (line,) = (line for line in outcome.out.splitlines() if line.startswith("| spearman"))
    assert line.count("[") == 2 and "| metric        | model" in outcome.out


def test_bad_mutants_are_refused_or_have_an_empty_score(mutations, capsys):
    write("bad.csv", [(MUTANTS[0],), *((bad,) for bad in BAD)], "mutant")
    outcome = mutations("score", "model0", "--table bad.csv --output scores.csv", refused=(3, f"row 2, {BAD[0]!r}: "))
    assert "or give --score.bad_mutants empty" in outcome.err and not [*Path().glob("scores*")]
    outcome = mutations("score", "model0", "--table bad.csv --output scores.csv --bad_mutants empty")
    assert "  5 rows without a score\n" in outcome.out
    assert [bool(row["score"]) for row in read("scores.csv")] == [True, *([False] * 5)]
    Path("two.fasta").write_text(f">a\n{WILD}\n>b\nMK\n")
    write("text.csv", [(MUTANTS[0], "high")], "mutant", "measured")
    for options, code, words in (
        ("--table mutants.csv --output s.txt", 2, "--score.output s.txt: must end in .csv or .tsv"),
        ("--table mutants.csv --output s.csv --sequence two.fasta", 3, "mutants.csv: no column 'protein'"),
        ("--table text.csv --output s.csv --measured_column measured", 3, "row 1, column 'measured': 'high' is not a"),
    ):
        mutations("score", "model0", options, refused=(code, words))
    save_small_model(prot_t5(Path("headless")), "t5", vocab_size=140)
    capsys.readouterr()  # of saving
    for model, words in (
        ("headless", "is not a masked language model with one token per residue"),
        ("esm2_t6_8M", "model size, not a checkpoint; give"),
    ):
        mutations("score", model, "--table mutants.csv --output s.csv", refused=(2, words))


def test_a_scan_is_the_scores_of_all_singles_with_a_picture(mutations):
    mutations("scan", "model0", "--output scan")
    rows = read("scan/mutants.csv")
    assert len(rows) == 12 * 19 and [row["position"] for row in rows[::19]] == [str(n + FIRST) for n in range(12)]
    write("singles.csv", [(row["mutant"], 0) for row in rows], "mutant", "my score")
    mutations("score", "model0", "--table singles.csv --output scores.csv")
    assert [row["score"] for row in rows] == [row["score"] for row in read("scores.csv")]
    assert Path("scan/heat_map.png").exists()
    mutations("scan", "model0", "--output scan --overwrite --method wild_type")
    assert read("scan/mutants.csv") != rows


def test_a_fitted_model_is_evaluated_exported_and_predicts(mutations, capsys):
    mutations("scan", "model1", "--output scan")  # its scores are the values to learn
    rows = [(row["mutant"], row["score"]) for row in read("scan/mutants.csv")]
    write("measured.csv", [*rows[::2], (rows[1][0], "")], "mutant", "score")
    options = "--features embeddings --sizes 60"
    outcome = mutations("fit", "model0", "--table measured.csv --output fitted", options)
    assert "features of 114 mutants: embeddings; zero-shot scores by model0 (masked)\n" in outcome.out
    assert outcome.out.count("## Folds") == 6 and "## Folds contiguous, 60 training mutants" in outcome.out
    evaluation = json.loads(Path("fitted/evaluation.json").read_text())["Folds random, all training mutants"]
    assert evaluation["records"] == 114 and [*evaluation["baselines"]] == ["zero-shot score", "ridge on one-hot"]
    assert Path("fitted/learning_curve.png").exists()
    spearman = evaluation["metrics"]["spearman"]
    assert spearman > evaluation["baselines"]["zero-shot score"]["metrics"]["spearman"]
    write("rest.csv", rows[1::2], "mutant", "measured")
    mutations("score", "fitted", "--table rest.csv --measured_column measured --output predicted.csv")
    predicted = read("predicted.csv")
    pairs = np.array([(row["measured"], row["score"]) for row in predicted], float)
    assert all(float(row["score_low"]) < float(row["score"]) < float(row["score_high"]) for row in predicted)
    assert np.corrcoef(pairs.T)[0, 1] > 0.5
    mutations("scan", "fitted", "--output predicted")
    scanned = {row["mutant"]: float(row["score"]) for row in read("predicted/mutants.csv")}
    np.testing.assert_allclose([scanned[row["mutant"]] for row in predicted], pairs[:, 1], rtol=1e-5, atol=1e-6)
    mutations("propose", "fitted", f"--output next.csv --number 5 --exclude_positions {FIRST + 2}-{FIRST + 11}")
    assert not {row["mutant"] for row in read("next.csv")} & {text for text, _ in rows[::2]}
    save_masked_lm(Path("model0"), "esm", vocab_size=33, seed=5)
    capsys.readouterr()  # of saving
    changed = (3, "model0: its weights have changed since the fit; fit again")
    mutations("score", "fitted", "--table rest.csv --output again.csv", refused=changed)
    Path("wild.fasta").write_text(f">other\n{WILD[:-1]}\n")
    other = (3, "was fitted to mutants of another protein")
    mutations("score", "fitted", "--table mutants.csv --bad_mutants empty --output again.csv", refused=other)


def test_many_proteins_share_a_command_and_its_metrics(mutations, command):
    (other,) = random_sequences([9], seed=5)
    Path("both.fasta").write_text(f">a\n{WILD}\n>b\n{other}\n")
    Path("assays").mkdir()
    random, rows, wild_types = np.random.default_rng(0), [], {"a": WILD, "b": other}
    for protein, wild in wild_types.items():
        pairs = [(n, letter) for n in range(len(wild)) for letter in AMINO_ACIDS[::3] if letter != wild[n]]
        found = [(f"{wild[n]}{n + FIRST}{letter}", random.normal()) for n, letter in pairs]
        rows += [(protein, *row) for row in found]
        whole = [wild[:n] + letter + wild[n + 1 :] for n, letter in pairs]
        write(f"assays/{protein}.csv", [(*row, text) for row, text in zip(found, whole, strict=True)], *GYM)
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
    write("c.csv", [("c", rows[0][1])], "protein", "mutant")
    refused = (3, "c.csv, row 1: no wild type is named 'c'")
    mutations("score", "model0", "--table c.csv --sequence both.fasta --output c_scores.csv", refused=refused)
    Path("ids.fasta").write_text(f">sp|P12345|A_HUMAN\n{WILD}\n>sp|P12346|B_HUMAN\n{other}\n")
    ids = {"a": "P12345", "b": "P12346.1"}
    # An unnamed index, as written by pandas, is a column, too.
    write("ids.csv", [(n, ids[protein], text) for n, (protein, text, _) in enumerate(rows)], "", "protein", "mutant")
    mutations("score", "model0", "--table ids.csv --sequence ids.fasta --output ids_scores.csv")
    assert [row["score"] for row in read("ids_scores.csv")] == [row["score"] for row in found]
    assert [row[""] for row in read("ids_scores.csv")] == [str(n) for n in range(len(rows))]
    # The wild type is found even if the first row does not show it.
    write("assays/a.csv", [(name(0, "*"), 0, ""), (name(1, "W"), 1, WILD[0] + "W" + WILD[2:])], *GYM)
    outcome = mutations("score", "model0", "--table assays --sequence none --output stops.csv", options)
    assert "  1 row without a score: a stop\n" in outcome.out
    write("assays/a.csv", [row[1:] for row in rows if row[0] == "a"], *GYM[:2])
    fit = "--features one_hot --folds rest --sizes 20 --measured_column DMS_score"
    outcome = mutations("fit", "model0", "--table assays --sequence both.fasta --output fitted", fit)
    evaluation = json.loads(Path("fitted/evaluation.json").read_text())
    assert [*evaluation["Folds rest, 20 training mutants"]] == ["a", "b"] and "| mean " in outcome.out
    mutations("score", "fitted", "--table both.csv --sequence both.fasta --output predicted.csv")
    assert all(row["score_low"] < row["score_high"] or float(row["score_low"]) < 0 for row in read("predicted.csv"))
    mutations("propose", "fitted", "--output next.csv", refused=(2, "propose.protein None: give one of a, b"))
    mutations("propose", "fitted", "--output next.csv --protein b --number 3")
    assert [row["protein"] for row in read("next.csv")] == ["b"] * 3


def test_a_column_replaces_a_model_and_a_proposed_plate_is_new(mutations, monkeypatch):
    monkeypatch.setitem(proposal._COMBINATIONS, "one_hot", 2_000)
    random = np.random.default_rng(0)
    singles = [(n, letter) for n in range(12) for letter in AMINO_ACIDS if letter != WILD[n]]
    effects = {pair: random.normal() + (pair[0] == 4) for pair in singles}
    rows = [(name(*pair), effects[pair], effects[pair] + random.normal()) for pair in singles]
    # The column has all singles; every third is measured.
    table = [(text, value if n % 3 == 0 else "", prior) for n, (text, value, prior) in enumerate(rows)]
    write("measured.csv", table, "mutant", "score", "published")
    fit = "--zero_shot_column published --features one_hot --folds rest"
    outcome = mutations("fit", "", "--table measured.csv --output fitted", fit)
    assert f"  {len(table) - 76} mutants without a value in column 'score' left out\n" in outcome.out
    mutations("score", "fitted", "--table measured.csv --compare published --output out.csv")
    column = (2, "by --score.compare published")
    mutations("score", "fitted", "--table mutants.csv --output other.csv", refused=column)
    write("few.csv", table[:5], "mutant", "score", "published")
    few = (3, "few.csv: only 2 mutants have values in all columns; give at least 20")
    mutations("fit", "model0", "--table few.csv --output few --zero_shot_column published", refused=few)
    options = f"--number 24 --mutations 3 --exclude_positions {FIRST + 2} {FIRST + 6}-{FIRST + 7} --exclude_residues CP"
    for strategy in ("ei", "ucb", "thompson"):
        mutations("propose", "fitted", f"--output {strategy}.csv --strategy {strategy}", options)
        plate = read(f"{strategy}.csv")
        proposed = [row["mutant"] for row in plate]
        assert [*plate[0]][:3] == ["mutant", "score", "published"] and len({*proposed}) == 24
        assert not {*proposed} & {text for text, value, _ in table if value != ""}
        parts = [part for text in proposed for part in text.split(":")]
        assert not {int(part[1:-1]) - FIRST for part in parts} & {2, 6, 7} and not {part[-1] for part in parts} & {
            *"CP"
        }
    assert any(":" in text for text in proposed)
    filled = [(row["mutant"], 1.0, row["published"]) for row in plate]
    write("plate.csv", filled, "mutant", "score", "published")
    mutations("fit", "nowhere/at_all", "--table measured.csv plate.csv --output again", fit)
    mutations("propose", "again", f"--output next.csv --candidates listed {options}")
    assert {row["mutant"] for row in read("next.csv")} <= {text for text, value, _ in table if value == ""}
    mutations(
        "propose", "model0", "--output no.csv", refused=(2, "model0: is not a fitted model; fit one with 'esmeray")
    )
    for wrong in ("positions 30-", "positions A24", "residues BZ"):
        refused = (2, f"propose.exclude_{wrong.split()[0]}")
        mutations("propose", "fitted", f"--output no.csv --exclude_{wrong}", refused=refused)


def test_a_campaign_finds_more_than_chance(mutations, monkeypatch):
    monkeypatch.setattr("esmeray.inference.mutations.campaign.TOP_SHARE", 0.1)
    random = np.random.default_rng(0)
    by_position = random.normal(size=12)
    singles = [(n, letter) for n in range(12) for letter in AMINO_ACIDS if letter != WILD[n]]
    values = [by_position[n] + 0.3 * random.normal() for n, _ in singles]
    rows = [(name(*pair), value, value + random.normal()) for pair, value in zip(singles, values, strict=True)]
    write("assay.csv", rows, "mutant", "score", "published")
    mutations("fit", "", "--table assay.csv --output fitted --zero_shot_column published --features one_hot")
    outcome = mutations("campaign", "fitted", "--output campaign --rounds 3 --number 20")
    found = {(row["way"], row["round"]): float(row["found"]) for row in read("campaign/campaign.csv")}
    assert len(found) == 3 * 3 and found["random", "3"] == pytest.approx(60 / len(rows))
    assert found["proposals", "3"] > max(2 * found["random", "3"], 0.6) and "| proposals" in outcome.out
    assert Path("campaign/campaign.png").exists()


def noise(replicates: int, seed: int = 0) -> list[tuple[str, float, float]]:
    """Single mutants with random values, repeated as replicates."""
    random = np.random.default_rng(seed)
    singles = [(n, letter) for n in range(12) for letter in AMINO_ACIDS[::2] if letter != WILD[n]]
    values = random.normal(size=(len(singles), 2))
    return [
        (name(*pair), value + 0.01 * random.normal(), prior)
        for pair, (value, prior) in zip(singles, values, strict=True)
        for _ in range(replicates)
    ]


def respelled(text: str, number: int) -> str:
    """A single mutant in another notation."""
    wild, position, new = text[0], text[1:-1], text[-1]
    names = {letter: NAME_OF[letter] for letter in AMINO_ACIDS}
    other = f"{WILD[0] if position != str(FIRST) else WILD[1]}{FIRST if position != str(FIRST) else FIRST + 1}"
    spellings = [text, text.lower(), f"p.{names[wild]}{position}{names[new]}", f"{text}:{other}{other[0]}"]
    return spellings[number % len(spellings)]


FIT = "--zero_shot_column zs --features one_hot"


def test_replicates_are_one_mutant_in_folds_sizes_plates_and_files(mutations):
    rows = noise(3)
    write(
        "plate1.csv",
        [(respelled(text, n), *rest) for n, (text, *rest) in enumerate(rows[::2])],
        "mutant",
        "score",
        "zs",
    )
    write(
        "plate2.csv",
        [(respelled(text, n), *rest) for n, (text, *rest) in enumerate(rows[1::2])],
        "mutant",
        "score",
        "zs",
    )
    tables = "--table plate1.csv plate2.csv"
    outcome = mutations("fit", "", tables, "--output fitted --folds random rest --sizes 40", FIT)
    size = len(rows) // 3
    assert f"features of {size} mutants" in outcome.out and f"  {len(rows)} measurements, averaged" in outcome.out
    evaluation = json.loads(Path("fitted/evaluation.json").read_text())
    assert len(evaluation) == 3
    for key, part in evaluation.items():
        assert part["records"] == size and abs(part["metrics"]["spearman"]) < 0.3, key
    # Equal to a fit on one measurement per mutant, also in interval widths: all were measured equally often.
    means = {}
    for text, score, prior in rows:
        means.setdefault((text, prior), []).append(score)
    once = [(text, float(np.mean(scores)), prior) for (text, prior), scores in means.items()]
    write("once.csv", once, "mutant", "score", "zs")
    mutations("fit", "", "--table once.csv --output once --folds random rest --sizes 40", FIT)
    for key, part in json.loads(Path("once/evaluation.json").read_text()).items():
        assert part["metrics"] == pytest.approx(evaluation[key]["metrics"], abs=0.02), key
    outcome = mutations("campaign", "fitted", f"--output campaign --rounds 2 --number {size // 2 + 1}")
    found = [float(row["found"]) for row in read("campaign/campaign.csv") if row["round"] == "2"]
    assert found and {*found} == {1.0}, "two plates of half of the mutants have them all"
    for model in ("model0",):
        mutations("score", model, tables, "--measured_column score --output scores.csv --method wild_type")
    assert len(read("scores.csv")) == len(rows)


def test_a_group_is_on_one_side_of_every_fold(mutations):
    rows = noise(1)
    # All members of a group have the same value: a training member would reveal the others.
    groups = [f"g{n % 24}" for n in range(len(rows))]
    values = np.random.default_rng(1).normal(size=24)
    table = [(text, values[n % 24], values[n % 24], groups[n]) for n, (text, *_) in enumerate(rows)]
    write("grouped.csv", table, "mutant", "score", "zs", "cluster")
    options = "--output fitted --groups cluster --sizes 30 --folds random rest"
    mutations("fit", "", "--table grouped.csv", options, FIT)
    mutations("propose", "fitted", "--output plate.csv --number 3 --candidates combinations")
    assert [*read("plate.csv")[0]][:4] == ["mutant", "score", "cluster", "zs"]
    refused = (2, "folds modulo: would split groups; use random or rest")
    mutations("fit", "", "--table grouped.csv --output no --groups cluster --folds modulo", FIT, refused=refused)
    write("two.csv", [*table, (table[0][0].lower(), 1, 1, "other")], "mutant", "score", "zs", "cluster")
    refused = (3, f"two.csv: {table[0][0]} has the groups 'g0', 'other'; give all its rows")
    mutations("fit", "", "--table two.csv --output no --groups cluster", FIT, refused=refused)
    write("none.csv", [*table[1:], (*table[0][:3], "NA")], "mutant", "score", "zs", "cluster")
    refused = (3, f"none.csv: {table[0][0]} has the groups ''; give all its rows the same")
    mutations("fit", "", "--table none.csv --output no --groups cluster", FIT, refused=refused)


def test_tables_of_mavedb_keep_their_columns_and_count_what_has_no_score(mutations):
    wild = [f"{NAME_OF[letter]}{FIRST + n}" for n, letter in enumerate(WILD)]
    texts = [
        f"p.{wild[0]}Trp",
        f"p.({wild[1]}Trp)",
        "p.=",
        "_wt",
        f"p.{wild[2]}Ter",
        f"p.{wild[3]}del",
        f"p.{wild[4]}=",
    ]
    rows = [(f"urn#{n}", "NA", text, n) for n, text in enumerate(texts)]
    write("maved.csv", rows, "accession", "hgvs_nt", "hgvs_pro", "score")
    outcome = mutations("score", "model0", "--table maved.csv --output scores.csv --method wild_type")
    found = read("scores.csv")
    assert [tuple(row.values())[:4] for row in found] == [tuple(map(str, row)) for row in rows]
    assert [row["model_score"] for row in found][2:] == ["0.0", "0.0", "", "", "0.0"]
    for line in ("2 rows without a score", "1 row without a score: a stop", "1 row without a score: a deletion"):
        assert f"  {line}\n" in outcome.out
    assert (
        "3 rows of the wild type (including synonymous mutations)" in outcome.out
        and "column of mutants, detected by name: hgvs_pro" in outcome.out
    )
    again = (2, "scores.csv: already has columns score and model_score, which the output adds; rename one")
    mutations("score", "model0", "--table scores.csv --output again.csv", refused=again)
    write("shifted.csv", [(f"{WILD[0]}1W",), (f"{WILD[1]}2W",), (f"{WILD[5]}6W",), ("wt",)], "mutant")
    hint = "every mutant would match with --score.first_position 1"
    mutations(
        "score", "model0", "--table shifted.csv --output s.csv", refused=(3, f"shifted.csv, row 1, '{WILD[0]}1W'")
    )
    outcome = mutations("score", "model0", "--table shifted.csv --output s.csv --bad_mutants empty")
    assert f"  3 rows without a score: {hint}\n" in outcome.out
    write("missing.csv", [(WILD, 1), ("NaN", 2), ("NA", 3), ("null", 4)], "seq", "score")
    options = "--table missing.csv --sequence_column seq --method pseudo --output m.csv"
    mutations("score", "model0", options, refused=(3, "missing.csv, row 2: the sequence is empty"))
    assert "  3 rows without a score: missing\n" in mutations("score", "model0", options, "--bad_mutants empty").out
    assert [bool(row["model_score"]) for row in read("m.csv")] == [True, False, False, False]


def test_propose_says_which_mutants_were_no_candidates_and_why(mutations):
    rows = noise(1)
    write("measured.csv", [*rows, ("WT", "", "")], "mutant", "score", "zs")
    mutations("fit", "", "--table measured.csv --output fitted --folds random", FIT)
    outcome = mutations("propose", "fitted", f"--output plate.csv --exclude_positions {FIRST} --exclude_residues y")
    assert all(":" in row["mutant"] for row in read("plate.csv"))
    assert f"single mutants not proposed, already measured: {WILD[0]}{FIRST}" in outcome.out
    for reason in ("without a value in column 'zs'", "at excluded positions", "with excluded residues"):
        assert f"single mutants not proposed, {reason}: " in outcome.out
    refused = (2, "missing: MODEL; give a model, or set features one_hot and zero_shot_column")
    mutations("fit", "", "--table measured.csv --output no --features one_hot", refused=refused)


def test_files_as_people_have_them(command, here, shared_data):
    field = shared_data.parent / "field" / "mutants"
    if not field.is_dir():
        pytest.skip(f"the files of the field are not at {field}")
    for table, kinds in {"hgvs": 1, "wtrows": 3, "comma": 0, "semi": 0, "evolvepro": 0}.items():
        line = f"mutations score model0 --score.sequence {field}/wild_type.fasta --score.table {field}/{table}.csv"
        outcome = command.done(f"{line} --score.output {table}.csv --score.method wild_type")
        assert outcome.out.count("without a score: ") == kinds
        rows = read(f"{table}.csv")
        empty = [not row.get("model_score", row.get("score")) for row in rows]
        assert sum(empty) == kinds and len(rows) > 1
    fit = f"--fit.sequence {field}/noise_wild_type.fasta {FIT.replace('--', '--fit.')} --fit.folds random rest"
    for table in ("replicates", "single"):
        command.done(f"mutations fit {fit} --fit.sizes 20 40 --fit.table {field}/{table}.csv --fit.output {table}")
        for part in json.loads(Path(table, "evaluation.json").read_text()).values():
            assert part["records"] == 80 and abs(part["metrics"]["spearman"]) < 0.25
