import pytest

from esmeray.dataset.section import IngestSection, LabelsSection, TokenizerSection
from esmeray.inference.classify.labelled import TextStream


def stream(*paths, labels=None, **ingest) -> TextStream:
    sections = LabelsSection(**(labels or {})), TokenizerSection(), IngestSection(**ingest)
    return TextStream([str(path) for path in paths], *sections)


def records(found: TextStream) -> list[tuple[str, str]]:
    return [record for part in found.parts() for record in zip(part.ids, part.texts, strict=True)]


@pytest.fixture
def fasta(tmp_path):
    (tmp_path / "a.fasta").write_text(">p1 x\nmkta*\n>p2\nMJ\n>p3\nAC\n")
    return tmp_path / "a.fasta"


def test_tables_and_fasta_follow_each_other_with_ids_that_stay_unique(fasta, tmp_path):
    (tmp_path / "b.csv").write_text("sequence\nMK\nTA\n")
    (tmp_path / "c.tsv").write_text("sequence\nAY\n")
    parts = list(stream(fasta, tmp_path / "b.csv", tmp_path / "c.tsv").parts())
    assert [record_id for part in parts for record_id in part.ids] == ["p1", "p2", "p3", "row1", "row2", "row3"]
    shares = [part.share for part in parts]
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_rows_without_a_text_are_counted_where_they_may_be_skipped(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id,sequence\na,MK\nb,\nc,TA\n")
    found = stream(path, labels={"empty_texts": "skip", "id_column": "id"})
    assert records(found) == [("a", "MK"), ("c", "TA")]
    assert (found.counts.records_read, found.counts.records_skipped_empty) == (3, 1)
