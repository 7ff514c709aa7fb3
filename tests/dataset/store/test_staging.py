"""A store is read from a verified copy on the node's own disk."""

from collections import namedtuple

import pytest

from common.errors import DataError, ResourceError
from dataset.store import staging
from dataset.store.format import DATA_FILE
from dataset.store.reader import Store
from dataset.store.staging import stage_once, stage_store


def test_a_staged_store_is_the_same_and_is_copied_once(store_path, tmp_path):
    staged = stage_store(store_path, tmp_path / "local")
    assert Store(staged, verify="full").checksum == Store(store_path).checksum
    written = (staged / DATA_FILE).stat().st_mtime_ns
    assert stage_store(store_path, tmp_path / "local") == staged
    assert (staged / DATA_FILE).stat().st_mtime_ns == written
    assert [path.name for path in (tmp_path / "local").iterdir()] == [staged.name]


def test_a_process_that_opens_a_store_often_verifies_its_copy_once(store_path, tmp_path, monkeypatch):
    copy = stage_once(store_path, tmp_path / "local")
    monkeypatch.setattr(staging, "stage_store", lambda *_: pytest.fail("staged again"))
    assert stage_once(store_path, tmp_path / "local") == copy
    assert Store(copy).checksum == Store(store_path).checksum


def test_a_damaged_copy_is_made_again(store_path, tmp_path):
    staged = stage_store(store_path, tmp_path / "local")
    data = bytearray((staged / DATA_FILE).read_bytes())
    data[len(data) // 2] ^= 1
    (staged / DATA_FILE).write_bytes(data)
    again = Store(stage_store(store_path, tmp_path / "local"), verify="full")
    assert again.path == staged and again.checksum == Store(store_path).checksum


def test_a_damaged_original_is_refused_and_not_staged(store_path, tmp_path):
    data = bytearray((store_path / DATA_FILE).read_bytes())
    data[len(data) // 2] ^= 1
    (store_path / DATA_FILE).write_bytes(data)
    with pytest.raises(DataError, match="checksum"):
        stage_store(store_path, tmp_path / "local")
    assert list((tmp_path / "local").iterdir()) == []


def test_a_node_without_room_is_refused_before_copying(store_path, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with pytest.raises(ResourceError, match="no room left"):
        stage_store(store_path, tmp_path / "local")
