"""Transactions are bounded, the map grows as it fills, and a full disk is one clear refusal."""

import pytest

from esmeray.common.errors import ResourceError
from esmeray.dataset.section import IngestSection
from esmeray.dataset.store import writer as store_writer
from esmeray.dataset.store.conversion import convert
from esmeray.dataset.store.format import DATA_FILE
from esmeray.dataset.store.reader import Store
from tests.dataset.store_fixtures import make_store, write_fasta


@pytest.mark.parametrize("transaction_bytes", [1, 300_000])
def test_a_map_that_is_full_grows_by_itself(tmp_path, sample, monkeypatch, transaction_bytes):
    monkeypatch.setattr(store_writer, "TRANSACTION_BYTES", transaction_bytes)
    monkeypatch.setattr(store_writer, "MAP_BYTES", 1 << 16)
    store = Store(make_store(tmp_path, sample), verify="full")
    assert [store.sequence(index).tobytes().decode() for index in range(len(store))] == [text for _, text in sample]
    list(store.residue_blocks())
    assert sorted(path.name for path in store.path.iterdir()) == [DATA_FILE, "manifest.json"]


def test_a_full_disk_is_refused_and_leaves_nothing(tmp_path, sample, full_disk):
    source = write_fasta(tmp_path / "in.fasta", sample)
    with full_disk(60_000), pytest.raises(ResourceError, match="no room left to write it") as refused:
        convert([str(source)], tmp_path / "store", IngestSection())
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.fasta"]
