"""Residue labels and masks are read from separate FASTA files, as written by biotrainer and FLIP."""

from pathlib import Path

import pytest

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.labels.conversion import ensure_labelled_store
from esmeray.dataset.labels.labelled_file import LabelledRecords
from esmeray.dataset.section import TokenizerSection
from tests.dataset.labels.test_labelled_file import TABLE, counted, read, refusal
from tests.dataset.stores import data_of, made, write_fasta, write_table

RESIDUES = [("a", "MKV"), ("b", "MKLA"), ("c", "MK*")]
LETTERS = [("b SET=train VALIDATION=True", "HHEC"), ("a SET=train VALIDATION=False", "CHE"), ("c SET=test", "EE")]
MASK = [("a", "011"), ("b", "1111"), ("c", "10")]
BY_HEADER = {"split": "column", "split_column": "SET"}


@pytest.fixture
def sequences(tmp_path: Path) -> Path:
    return write_fasta(tmp_path / "sequences.fasta", RESIDUES)


def label_files(folder: Path, labels: list = LETTERS, mask: list | None = None) -> dict[str, str]:
    """Write the files and return the settings with their paths."""
    named = {"kind": "per_residue", "labels_file": str(write_fasta(folder / "labels.fasta", labels))}
    return named if mask is None else named | {"mask_file": str(write_fasta(folder / "mask.fasta", mask))}


def test_labels_find_their_sequences_by_id_with_masks_and_who_is_held_out(tmp_path, sequences):
    records: LabelledRecords = read(sequences, **label_files(tmp_path))
    assert list(zip(records.ids, records.labels, strict=True)) == [("a", "CHE"), ("b", "HHEC"), ("c", "EE")]
    assert read(sequences, **label_files(tmp_path, mask=MASK)).labels == [".HE", "HHEC", "E."]
    assert records.parts is None
    assert read(sequences, **label_files(tmp_path), **BY_HEADER).parts == ["training", "validation", "test"]


@pytest.mark.parametrize(
    ("labels", "mask", "message"),
    [
        (LETTERS[:2], None, "sequences.fasta, line 5, record 3 'c': labels.fasta has no labels for this id; complete"),
        (
            [*LETTERS, ("d SET=test", "HH"), ("e SET=test", "H")],
            None,
            "labels.fasta, line 7, record 4 'd': data.source has no",
        ),
        ([*LETTERS[:2], ("c SET=test", "E")], None, "sequences.fasta, line 5, record 3 'c': 1 label in labels.fasta"),
        ([*LETTERS, ("a SET=test", "CCC")], None, "labels.fasta, line 7, record 4 'a': duplicate id 'a', first at"),
        (LETTERS, MASK[:2], "labels.fasta, line 5, record 3 'c': mask.fasta has no mask for this id; add one, e.g."),
        (
            LETTERS,
            [*MASK[:2], ("c", "1x")],
            "mask.fasta, line 5, record 3 'c': the mask must have 2 letters, like the labels (labels.fasta",
        ),
        ([*LETTERS[:2], ("c VALIDATION=x", "EE")], None, "labels.fasta, line 5, record 3 'c': no SET= in the header"),
        ([*LETTERS[:2], ("c SET=x", "EE")], None, "labels.fasta, line 5, record 3 'c': SET: unknown split 'x'; use"),
    ],
)
def test_labels_that_do_not_fit_sequences_are_refused_with_their_place(tmp_path, sequences, labels, mask, message):
    found = refusal(sequences, **label_files(tmp_path, labels, mask), **BY_HEADER).replace(f"{tmp_path}/", "")
    assert found.startswith(message)


def test_unmatched_labels_and_sequences_can_be_left_out_counted(tmp_path, sequences):
    records = read(sequences, **label_files(tmp_path, [*LETTERS[:2], ("d", "HH")]), missing_labels="skip")
    assert records.ids == ["a", "b"]
    skipped = {"records_skipped_missing_label": 1, "labels_without_sequence": 1}
    assert counted(records) == {"stops_dropped": 1, **skipped}


def test_labels_files_of_tables_and_of_other_kinds_are_refused(tmp_path):
    path = write_table(tmp_path / "in.csv", TABLE, ("MK", "HH"))
    assert "data.labels.labels_file applies to FASTA" in refusal(path, error=ConfigError, **label_files(tmp_path))


def test_changed_labels_or_masks_make_another_store(tmp_path, sequences):
    labels, stores = label_files(tmp_path, LETTERS, MASK), tmp_path / "stores"
    unnamed, named = (data_of(sequences, store=store, share=0.0, **labels) for store in (None, tmp_path / "named"))
    first = ensure_labelled_store(unnamed, TokenizerSection(), stores)
    assert made(named, stores).residue_targets(0).tolist() == [-100, 2, 1]
    assert ensure_labelled_store(unnamed, TokenizerSection(), stores) == first
    write_fasta(tmp_path / "mask.fasta", [("a", "110"), *MASK[1:]])
    assert ensure_labelled_store(unnamed, TokenizerSection(), stores) != first
    with pytest.raises(DataError, match=r"built with another data\.labels\.labels_file or mask_file"):
        made(named, stores)
