"""Labels of residues in a FASTA file of their own, and a mask beside it, are read as biotrainer and FLIP write them."""

from pathlib import Path

import pytest

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.labels.conversion import ensure_labelled_store
from esmeray.dataset.labels.labelled_file import LabelledRecords
from esmeray.dataset.section import LabelsSection, TokenizerSection
from tests.dataset.labelled_stores import data_of, made
from tests.dataset.labels.test_labelled_file import counted, read, refusal
from tests.dataset.stores import write_fasta

SEQUENCES = [("a", "MKV"), ("b", "MKLA"), ("c", "MK*")]
LABELS = [("b SET=train VALIDATION=True", "HHEC"), ("a SET=train VALIDATION=False", "CHE"), ("c SET=test", "EE")]
MASK = [("a", "011"), ("b", "1111"), ("c", "10")]
BY_HEADER = {"split": "column", "split_column": "SET"}


@pytest.fixture
def sequences(tmp_path: Path) -> Path:
    return write_fasta(tmp_path / "sequences.fasta", SEQUENCES)


def files(folder: Path, labels: list = LABELS, mask: list | None = None) -> dict[str, str]:
    """The settings that name the files that are written."""
    named = {"kind": "per_residue", "labels_file": str(write_fasta(folder / "labels.fasta", labels))}
    return named if mask is None else named | {"mask_file": str(write_fasta(folder / "mask.fasta", mask))}


def test_labels_find_their_sequences_by_id_with_masks_and_who_is_held_out(tmp_path, sequences):
    records: LabelledRecords = read(sequences, **files(tmp_path))
    assert list(zip(records.ids, records.labels, strict=True)) == [("a", "CHE"), ("b", "HHEC"), ("c", "EE")]
    assert read(sequences, **files(tmp_path, mask=MASK)).labels == [".HE", "HHEC", "E."]
    assert records.parts is None
    assert read(sequences, **files(tmp_path), **BY_HEADER).parts == ["training", "validation", "test"]


@pytest.mark.parametrize(
    ("labels", "mask", "message"),
    [
        (LABELS[:2], None, "sequences.fasta, line 5, record 3 'c': no labels of this id in labels.fasta; complete or"),
        ([*LABELS, ("d SET=test", "HH"), ("e SET=test", "H")], None, "labels.fasta, line 7, record 4 'd': no sequence"),
        ([*LABELS[:2], ("c SET=test", "E")], None, "sequences.fasta, line 5, record 3 'c': 1 label in labels.fasta"),
        ([*LABELS, ("a SET=test", "CCC")], None, "labels.fasta, line 7, record 4 'a': the id 'a' stands already in"),
        (LABELS, MASK[:2], "labels.fasta, line 5, record 3 'c': no mask of this id in mask.fasta; add it"),
        (LABELS, [*MASK[:2], ("c", "1x")], "mask.fasta, line 5, record 3 'c': no mask of 2 letters (labels.fasta, l"),
        ([*LABELS[:2], ("c VALIDATION=x", "EE")], None, "labels.fasta, line 5, record 3 'c': no SET= in the header;"),
        ([*LABELS[:2], ("c SET=x", "EE")], None, "labels.fasta, line 5, record 3 'c': SET: the split 'x' is not known"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_its_place(tmp_path, sequences, labels, mask, message):
    found = refusal(sequences, **files(tmp_path, labels, mask), **BY_HEADER).replace(f"{tmp_path}/", "")
    assert found.startswith(message)


def test_sequences_without_labels_and_labels_without_sequences_can_be_left_out_counted(tmp_path, sequences):
    records = read(sequences, **files(tmp_path, [*LABELS[:2], ("d", "HH")]), missing_labels="skip")
    assert records.ids == ["a", "b"]
    skipped = {"records_skipped_missing_label": 1, "labels_without_sequence": 1}
    assert counted(records) == {"stops_dropped": 1, **skipped}


def test_settings_and_files_that_do_not_fit_together_are_refused(tmp_path):
    (tmp_path / "in.csv").write_text("sequence,label\nMK,HH\n")
    message = refusal(tmp_path / "in.csv", error=ConfigError, **files(tmp_path))
    assert "data.labels.labels_file is for FASTA" in message
    for settings, message in (
        ({"labels_file": "l.fasta"}, "labels_file is for kind per_residue, not for multiclass"),
        ({"mask_file": "m.fasta", "kind": "per_residue"}, "mask_file goes with labels_file"),
        ({"labels_file": "l.fasta", "kind": "per_residue", "header_field": 1}, "can't both be set"),
    ):
        with pytest.raises(ValueError, match=message):
            LabelsSection(**settings)


def test_changed_labels_or_masks_make_another_store(tmp_path, sequences):
    labels, stores = files(tmp_path, LABELS, MASK), tmp_path / "stores"
    unnamed, named = (data_of(sequences, store=store, share=0.0, **labels) for store in (None, tmp_path / "named"))
    first = ensure_labelled_store(unnamed, TokenizerSection(), stores)
    assert made(named, stores).residue_targets(0).tolist() == [-100, 2, 1]
    assert ensure_labelled_store(unnamed, TokenizerSection(), stores) == first
    write_fasta(tmp_path / "mask.fasta", [("a", "110"), *MASK[1:]])
    assert ensure_labelled_store(unnamed, TokenizerSection(), stores) != first
    with pytest.raises(DataError, match=r"made with other data\.labels\.labels_file or mask_file"):
        made(named, stores)
