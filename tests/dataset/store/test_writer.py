"""Transactions are bounded, the map grows by itself, and a full disk is one clear refusal."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dataset.store import writer as store_writer
from dataset.store.format import DATA_FILE, find_index_pages, read_manifest
from dataset.store.reader import Store
from tests.conftest import REPOSITORY
from tests.dataset.store_fixtures import make_store, write_fasta

FILE_SIZE_LIMIT = """
import resource, sys
from tools.__main__ import main
from common.command_line import run

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(run(main, sys.argv[2:]))
"""


@pytest.mark.parametrize("transaction_bytes", [1, 300_000, 1 << 30])
def test_a_map_that_is_full_grows_by_itself(tmp_path, sample, monkeypatch, transaction_bytes):
    monkeypatch.setattr(store_writer, "TRANSACTION_BYTES", transaction_bytes)
    store = Store(make_store(tmp_path, sample, map_size_bytes=1 << 16), verify="full")
    assert [store.sequence(index).tobytes().decode() for index in range(len(store))] == [text for _, text in sample]
    store.verify_blocks()


def test_no_more_than_a_transaction_is_held_back(tmp_path, sample, monkeypatch):
    monkeypatch.setattr(store_writer, "TRANSACTION_BYTES", 300_000)
    held = []
    commit = store_writer.StoreWriter._commit
    monkeypatch.setattr(
        store_writer.StoreWriter, "_commit", lambda writer: held.append(writer._pending_bytes) or commit(writer)
    )
    make_store(tmp_path, sample)
    assert len(held) > 2
    assert max(held) < 300_000 + 400_000  # one block more than the bound at most


@pytest.mark.parametrize("limit", [4_000, 60_000, 500_000])
def test_a_full_disk_is_refused_and_leaves_nothing(tmp_path, sample, limit):
    # A limit on the size of files stands in for a full disk: the same failing writes, without a file system to fill.
    source = write_fasta(tmp_path / "in.fasta", sample)
    command = [sys.executable, "-c", FILE_SIZE_LIMIT, str(limit), "fasta2lmdb", source, tmp_path / "store"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    assert "no room left to write it" in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.fasta"]


def test_the_index_pages_are_those_that_hold_no_values(tmp_path, sample):
    path = make_store(tmp_path, sample)
    manifest = read_manifest(path)
    pages = find_index_pages(path / DATA_FILE, manifest.page_bytes)
    assert pages == manifest.index_pages
    data = (path / DATA_FILE).read_bytes()
    frames_in_index = [page for page in pages if b"ESMR" in data[page * 4096 : (page + 1) * 4096]]
    # The array of block starts is small enough to lie inside the B-tree; every block has pages of its own.
    assert len(frames_in_index) <= 1
    assert len(pages) < 10


def test_a_store_has_no_lock_file(tmp_path):
    assert sorted(path.name for path in make_store(tmp_path, [("a", "MK")]).iterdir()) == [DATA_FILE, "manifest.json"]
