"""The compiled reader equals dnaio and the line reader, or leaves unusual text to the line reader."""

from pathlib import Path
from unittest.mock import patch

import dnaio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.common.errors import DataError
from esmeray.dataset.fasta import reader as fasta
from esmeray.dataset.fasta import records
from esmeray.dataset.fasta.reader import MAX_RESIDUES, FastaSource
from esmeray.dataset.fasta.records import Records, load_kernel

plain_header = st.text("ab |>#.:", max_size=8)
plain_line = st.text("MKV*-x>J", min_size=1, max_size=12)
plain_end = st.sampled_from(["\n", "\r\n"])
plain_records = st.lists(st.tuples(plain_header, plain_end, st.lists(plain_line, max_size=4)), min_size=1, max_size=8)
plain_text = plain_records.map(
    lambda records: "".join(f">{header}{end}" + "".join(line + end for line in lines) for header, end, lines in records)
)
odd_piece = st.sampled_from(
    ["", "\n", "\r", "\r\n", " ", "\t", "#", "\n#", ";", "\n;", "\n >", ">", "\0", "\x01", "\xe9", "\x85", "@"]
)


@st.composite
def fasta_text(draw: st.DrawFn) -> bytes:
    """Draw plain FASTA with one unusual piece inserted at any position, maybe without the last line feed.

    Only one piece: with two faults, the reported one depends on the size of the blocks that are read.
    """
    text = draw(plain_text)
    at = draw(st.integers(0, len(text)))
    text = text[:at] + draw(odd_piece) + text[at:]
    return text.removesuffix(draw(st.sampled_from(["", "\n"]))).encode()


def read(path: Path) -> list[tuple[bytes, bytes, int, int]] | str:
    """Records with the hashes of id and sequence, or the message of the refusal."""
    try:
        batches = list(FastaSource([str(path)]).batches())
    except DataError as error:
        return str(error)
    records = Records.joined([batch.records for batch in batches])
    hashes = records.id_hashes.tolist(), records.hashes.tolist()
    return list(zip(records.headers.split(), records.sequences, *hashes, strict=True))


@pytest.mark.skipif(load_kernel() is None, reason="needs a C++ compiler")
@settings(max_examples=80, deadline=None)
@given(text=fasta_text(), chunk_bytes=st.integers(1, 40), longest=st.sampled_from([12, 24, MAX_RESIDUES]))
def test_any_text_reads_as_by_lines_or_is_refused_in_the_same_words(tmp_path_factory, text, chunk_bytes, longest):
    path = tmp_path_factory.mktemp("text") / "in.fasta"
    path.write_bytes(text)
    with patch.multiple(fasta, CHUNK_BYTES=chunk_bytes, MAX_RESIDUES=longest):
        found = read(path)
    with patch.multiple(fasta, load_kernel=lambda: None, MAX_RESIDUES=longest):
        assert found == read(path)
    if not isinstance(found, str):
        # dnaio reads comments as residues.
        path.write_text("".join(line for line in text.decode().splitlines(True) if not line.lstrip().startswith(";")))
        with dnaio.open(path) as reader:
            expected = [(record.name.encode(), record.sequence.encode()) for record in reader]
        assert [row[:2] for row in found] == expected


@pytest.mark.parametrize("library", [__file__, "missing.so"])
def test_an_xxhash_without_the_exported_function_reads_by_lines(tmp_path, monkeypatch, library):
    (tmp_path / "in.fasta").write_text(">a\nMKV\n")
    expected = read(tmp_path / "in.fasta")
    monkeypatch.setattr(records._xxhash, "__file__", library)
    assert load_kernel() is None
    assert read(tmp_path / "in.fasta") == expected
