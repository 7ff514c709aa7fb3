import pytest

from common.errors import DataError
from inference.classify.text_stream import TextStream
from train_config.classifier_schema import LabelsSection, TokenizerSection
from train_config.schema import IngestSection


def stream(*paths, labels=None, **ingest) -> TextStream:
    sections = LabelsSection(**(labels or {})), TokenizerSection(), IngestSection(**ingest)
    return TextStream([str(path) for path in paths], *sections)


def records(found: TextStream) -> list[tuple[str, str]]:
    return [record for part in found for record in zip(part.ids, part.texts, strict=True)]


@pytest.fixture
def fasta(tmp_path):
    (tmp_path / "a.fasta").write_text(">p1 x\nmkta*\n>p2\nMJ\n>p3\nAC\n")
    return tmp_path / "a.fasta"


def test_residues_are_mended_and_counted_as_for_training(fasta):
    found = stream(fasta)
    assert records(found) == [("p1", "MKTA"), ("p2", "MX"), ("p3", "AC")]
    assert (found.counts.records_read, found.counts.stops_dropped, found.counts.j_to_x) == (3, 1, 1)


def test_tables_and_fasta_follow_each_other_with_ids_that_stay_unique(fasta, tmp_path):
    (tmp_path / "b.csv").write_text("sequence\nMK\nTA\n")
    (tmp_path / "c.tsv").write_text("sequence\nAY\n")
    parts = list(stream(fasta, tmp_path / "b.csv", tmp_path / "c.tsv"))
    assert [record_id for part in parts for record_id in part.ids] == ["p1", "p2", "p3", "row1", "row2", "row3"]
    shares = [part.share for part in parts]
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_all_refused_records_are_reported_once_the_files_are_read(fasta, tmp_path):
    (tmp_path / "b.fasta").write_text(">p3\nM1\n>p4\nMK\n")
    with pytest.raises(DataError) as raised:
        records(stream(fasta, tmp_path / "b.fasta"))
    summary, character, repeated = raised.value.problems
    assert summary == "2 faults: 1 record with characters outside the alphabet, 1 id that stood before"
    assert "b.fasta, line 2, column 2, record 1 'p3'" in character
    assert repeated.endswith(
        "a.fasta, line 5, record 3 'p3'; make ids unique, or give --data.ingest.duplicate_ids first (or rename)"
    )


def test_rows_without_a_text_are_counted_where_they_may_be_skipped(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id,sequence\na,MK\nb,\nc,TA\n")
    found = stream(path, labels={"empty_texts": "skip", "id_column": "id"})
    assert records(found) == [("a", "MK"), ("c", "TA")]
    assert (found.counts.records_read, found.counts.records_skipped_empty) == (3, 1)
