"""A file is read by another thread, and what happens there is seen where its text is taken."""

from __future__ import annotations

import gzip

import pytest
import xxhash

from dataset.fasta import read_ahead
from dataset.fasta.read_ahead import ReadAhead


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_chunks_are_the_text_and_the_checksum_is_the_files(tmp_path, monkeypatch, compress):
    monkeypatch.setattr(read_ahead, "CHUNK_BYTES", 1000)
    text = b">a\n" + b"MKV" * 5000
    path = tmp_path / "in.fasta"
    path.write_bytes(compress(text))
    with ReadAhead(path) as reading:
        chunks = [bytes(chunk) for chunk in reading]
        assert reading.bytes_read == path.stat().st_size
    assert b"".join(chunks) == text
    assert set(map(len, chunks[:-1])) == {1000}
    assert reading.source_file().xxh128 == xxhash.xxh3_128(path.read_bytes()).hexdigest()


def test_what_stands_behind_the_compressed_data_belongs_to_the_checksum(tmp_path):
    path = tmp_path / "in.fasta.gz"
    path.write_bytes(gzip.compress(b">a\nMK\n") + b"\0" * 1_000_000)
    with ReadAhead(path) as reading:
        assert b"".join(map(bytes, reading)) == b">a\nMK\n"
    assert reading.source_file().xxh128 == xxhash.xxh3_128(path.read_bytes()).hexdigest()
