"""Transactions are bounded, the map grows as it fills, and a full disk is one clear refusal."""

import subprocess
import sys

import pytest

from esmeray.dataset.store import writer as store_writer
from esmeray.dataset.store.format import DATA_FILE
from esmeray.dataset.store.reader import Store
from tests.conftest import REPOSITORY
from tests.dataset.store_fixtures import make_store, write_fasta

FILE_SIZE_LIMIT = """
import resource, sys
from esmeray.tools.__main__ import main
from esmeray.common.command_line import run

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(run(main, sys.argv[2:]))
"""


@pytest.mark.parametrize("transaction_bytes", [1, 300_000])
def test_a_map_that_is_full_grows_by_itself(tmp_path, sample, monkeypatch, transaction_bytes):
    monkeypatch.setattr(store_writer, "TRANSACTION_BYTES", transaction_bytes)
    monkeypatch.setattr(store_writer, "MAP_BYTES", 1 << 16)
    store = Store(make_store(tmp_path, sample), verify="full")
    assert [store.sequence(index).tobytes().decode() for index in range(len(store))] == [text for _, text in sample]
    list(store.residue_blocks())
    assert sorted(path.name for path in store.path.iterdir()) == [DATA_FILE, "manifest.json"]


def test_a_full_disk_is_refused_and_leaves_nothing(tmp_path, sample):
    # A limit on the size of files stands in for a full disk: the same failing writes, without a file system to fill.
    source = write_fasta(tmp_path / "in.fasta", sample)
    options = ["--data.source", source, "--convert.store", tmp_path / "store"]
    command = [sys.executable, "-c", FILE_SIZE_LIMIT, "60000", "data", "convert", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    assert "no room left to write it" in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.fasta"]
