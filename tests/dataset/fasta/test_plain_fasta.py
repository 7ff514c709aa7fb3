"""The reader of plain FASTA gives what dnaio gives, or says that the text is not plain."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import DataError
from dataset.fasta import plain_fasta, read_ahead
from dataset.fasta import reader as fasta
from dataset.fasta.kernel import Kernel, load_kernel
from dataset.fasta.plain_fasta import PlainFasta
from dataset.fasta.reader import FastaSource
from dataset.fasta.records import Records

plain_header = st.text("ab |>#.:", max_size=8)
plain_line = st.text("MKV*-x>J", min_size=1, max_size=12)
plain_text = st.lists(st.tuples(plain_header, st.lists(plain_line, max_size=4)), min_size=1, max_size=8).map(
    lambda records: "".join(f">{header}\n" + "".join(f"{line}\n" for line in lines) for header, lines in records)
)
odd_piece = st.sampled_from(
    ["", "\n", "\r", "\r\n", " ", "\t", "#", "\n#", "\n >", ">", "\0", "\x01", "\xe9", "\x85", "@"]
)


@st.composite
def fasta_text(draw: st.DrawFn) -> bytes:
    """Plain FASTA with a piece put in anywhere that may make it unusual, and perhaps without the last line feed.

    One piece alone: which of two faults is named depends on how much is read at a time.
    """
    text = draw(plain_text)
    at = draw(st.integers(0, len(text)))
    text = text[:at] + draw(odd_piece) + text[at:]
    return text.removesuffix(draw(st.sampled_from(["", "\n"]))).encode()


def read(path: Path) -> list[tuple[bytes, bytes]] | str:
    """The records, or the message of the refusal."""
    try:
        batches = list(FastaSource([str(path)]).batches())
    except DataError as error:
        return str(error)
    return [pair for batch in batches for pair in zip(batch.headers, batch.sequences, strict=True)]


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return load_kernel() or pytest.skip("needs a C++ compiler")


@settings(max_examples=120, deadline=None)
@given(text=fasta_text(), chunk_bytes=st.integers(1, 40))
def test_any_text_reads_as_dnaio_reads_it_or_is_refused_in_the_same_words(tmp_path_factory, kernel, text, chunk_bytes):
    path = tmp_path_factory.mktemp("text") / "in.fasta"
    path.write_bytes(text)
    with patch.object(read_ahead, "CHUNK_BYTES", chunk_bytes):
        found = read(path)
    with patch.object(fasta, "load_kernel", lambda: None):  # dnaio reads all of it
        assert found == read(path)


@settings(max_examples=100, deadline=None)
@given(text=plain_text, sizes=st.lists(st.integers(1, 30), min_size=1))
def test_plain_text_is_never_left_to_dnaio_wherever_chunks_end(kernel, text, sizes):
    plain, at, found = PlainFasta(kernel), 0, []
    while at < len(text):
        for size in sizes:
            records = plain.feed(memoryview(text.encode()[at : at + size]))
            found.append(records)
            at += size
    found.append(plain.finish())
    assert None not in found
    assert plain.unparsed() == b""
    joined = Records.joined(found)
    same = Records.of(joined.headers.split(), joined.sequences)
    assert len(joined) == text.count("\n>") + 1
    assert joined.headers.text == same.headers.text
    assert joined.ids.text == same.ids.text
    for name in ("lengths", "id_hashes", "hashes"):
        assert getattr(joined, name).tolist() == getattr(same, name).tolist()
        assert getattr(joined, name).dtype == getattr(same, name).dtype


@pytest.mark.parametrize(
    "text",
    [
        ">a\nMK\r\n",
        ">a\nMK V\n",
        ">a\nMK \n",
        ">a\n\nMK\n",
        ">a\n#MK\n",
        ">a\xe9\nMK\n",
        ">a\tb\nMK\n",
        "MK\n",
        ">a\n\n",
        "\n>a\nM\n",
    ],
    ids=repr,
)
def test_what_is_not_plain_is_left_as_it_was(kernel, text):
    plain = PlainFasta(kernel)
    if plain.feed(memoryview(text.encode())) is not None:
        assert plain.finish() is None
    assert plain.unparsed() == text.encode()


def test_a_file_without_headers_is_not_taken_into_memory_whole(kernel, monkeypatch):
    monkeypatch.setattr(plain_fasta, "LONGEST_RECORD_BYTES", 100)
    plain = PlainFasta(kernel)
    fed = [plain.feed(memoryview(text)) for text in (b">a\nMK\n>b\n", b"MKV" * 20, b"MKV" * 20)]
    assert [None if records is None else records.headers.split() for records in fed] == [[b"a"], [], None]
    assert plain.unparsed() == b">b\n" + b"MKV" * 40
