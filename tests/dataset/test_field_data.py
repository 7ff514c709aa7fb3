"""Tables and FASTA files from the field give the same values as pandas and Biopython, or are refused."""

from pathlib import Path

import pytest

from esmeray.dataset.section import IngestSection
from esmeray.dataset.store.conversion import convert
from tests.dataset.stores import contents, data_of, made

SKIP = {"missing_labels": "skip", "empty_texts": "skip"}
SETS = {"kind": "multilabel"}
FLIP = {"kind": "regression", "label_columns": ["target"], "split": "column", "split_column": "set"}
RESIDUES = {"kind": "per_residue"}
LOCATIONS = ("Cytoplasm", "Nucleus")


@pytest.fixture(scope="module")
def field(shared_data: Path) -> Path:
    return shared_data.parent / "field"


@pytest.mark.parametrize(
    ("name", "settings", "names", "records", "counts"),
    [
        ("missing_sequences", SKIP, LOCATIONS, 54, {"records_skipped_empty": 6}),
        ("labels_na", SKIP, LOCATIONS, 48, {"records_skipped_missing_label": 12}),
        ("labels_na", SKIP | {"not_missing": ["NA"]}, (*LOCATIONS[:1], "NA", "Nucleus"), 50, {}),
        ("labels_pipe", SETS | {"separator": "|"}, LOCATIONS, 60, {}),
        ("labels_comma", SETS | {"separator": ","}, LOCATIONS, 60, {}),
        ("labels_json", SETS, LOCATIONS, 60, {}),
        ("labels_pylist", SETS, LOCATIONS, 60, {}),
        ("labels_flip", FLIP, ("target",), 60, {"held_out_by_validation": 6, "validation": 6, "training": 39}),
        ("dssp", RESIDUES, ("E", "H"), 40, {"residues_not_known": {"'-'": 160}}),
        ("dssp", RESIDUES | {"unknown_letters": ".?"}, ("-", "E", "H"), 40, {"residues_not_known": {}}),
    ],
)
def test_tables_give_their_classes_and_counts(field, tmp_path, name, settings, names, records, counts):
    labelled = made(data_of(field / "tables" / f"{name}.csv", **settings), tmp_path)
    assert (labelled.label_space.names, len(labelled)) == (names, records)
    assert labelled.counts.model_dump() | counts == labelled.counts.model_dump()


@pytest.mark.parametrize("bad_characters", ["error", "to_x", "skip"])
def test_comments_are_no_residues_under_any_policy(field, tmp_path, bad_characters):
    ingest = IngestSection(bad_characters=bad_characters)
    sources = [str(field / "fasta" / "inside.fasta")]
    assert convert(sources, tmp_path / "inside", ingest).counts.comment_lines == 2
    assert contents(tmp_path / "inside") == [("P1", "MKTAYIAKQR"), ("P2", "GAVLIPFW")]
    convert([str(field / "fasta" / "start.fasta")], tmp_path / "start", ingest)
    assert contents(tmp_path / "start") == [("P1", "MKTAYIAKQR")]
