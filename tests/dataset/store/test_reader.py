"""A store returns every record without a copy; a damaged store is refused and never crashes the process."""

import json
import multiprocessing
import os
import random
from collections import namedtuple
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import lmdb
import numpy as np
import pytest
import xxhash

from esmeray.common.errors import DataError, ResourceError
from esmeray.dataset.section import IngestSection
from esmeray.dataset.store import reader
from esmeray.dataset.store.conversion import convert
from esmeray.dataset.store.format import DATA_FILE, FORMAT_VERSION, HEADER_BYTES, MANIFEST_FILE, signed_json
from esmeray.dataset.store.reader import Store, stage_store
from tests.damage import refuse_silence
from tests.dataset.stores import contents, damage_record, make_store


def is_refused(store_path: Path, verify: str, clean: bytes, bit: int) -> bool:
    damaged = bytearray(clean)
    damaged[bit // 8] ^= 1 << bit % 8
    (store_path / DATA_FILE).unlink()  # a new inode for every trial: this process keeps the earlier ones open
    (store_path / DATA_FILE).write_bytes(damaged)
    try:
        store = Store(store_path, verify=verify)
        assert store.lengths.sum() and store.sequence_hashes.sum() and contents(store)
    except DataError:
        return True
    return False


def all_are_refused(store_path: Path, verify: str, bits: list[int]) -> bool:
    """Test that a full read is refused for each flipped bit, one at a time; a crash would break the pool."""
    read = partial(is_refused, store_path, verify, (store_path / DATA_FILE).read_bytes())
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return all(pool.map(read, bits))


def test_every_record_comes_back_as_a_read_only_view_of_the_map(pristine_store, sample):
    store = Store(pristine_store, verify="full")
    assert contents(store) == sample
    assert store.lengths.tolist() == [len(sequence) for _, sequence in sample]
    assert store.sequence_hashes.tolist() == [xxhash.xxh3_64_intdigest(sequence.encode()) for _, sequence in sample]
    assert store.manifest.num_blocks > 2
    first, second = store.sequence(0), store.sequence(1)
    assert not first.flags.owndata and not first.flags.writeable
    assert second.ctypes.data == first.ctypes.data + len(first)
    assert store.lengths.dtype == np.uint32 and not store.lengths.flags.writeable
    assert store.sequence_hashes.dtype == np.uint64 and not store.sequence_hashes.flags.writeable
    assert not store.lengths.flags.owndata


def test_windows_are_parts_of_the_records(pristine_store, sample):
    store = Store(pristine_store)
    random = np.random.default_rng(0)
    records = random.permutation(len(sample))
    starts = random.integers(0, store.lengths[records])
    lengths = random.integers(0, store.lengths[records] - starts + 1)
    windows = store.windows(records, starts, lengths)
    for window, record, start, length in zip(windows, records, starts, lengths, strict=True):
        assert bytes(window).decode() == sample[record][1][start : start + length]
    assert all(window.readonly for window in windows)
    assert store.windows(records[:0], starts[:0], lengths[:0]) == []


@pytest.mark.parametrize("index", [-1, 3000, 10**12])
def test_records_that_are_not_there_are_an_index_error(pristine_store, index):
    with pytest.raises(IndexError, match="but the store has 3000"):
        Store(pristine_store).windows(np.array([5, index]), np.zeros(2, np.int64), np.ones(2, np.int64))
    with pytest.raises(IndexError):
        Store(pristine_store).sequence(index)


def in_forked_child(check) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if check() else 1)
    return os.waitpid(child, 0)[1] == 0


def test_a_forked_child_opens_the_store_itself(store_path, sample):
    store = Store(store_path)
    assert in_forked_child(lambda: store.text(3) == sample[3][1])
    residues = store.sequence(2)

    def is_refused() -> bool:
        with pytest.raises(RuntimeError, match="opened before this process was forked"):
            store.sequence(3)
        return residues.tobytes().decode() == sample[2][1]

    assert in_forked_child(is_refused)


def test_a_flipped_bit_anywhere_is_refused_in_full_without_a_signal(store_path):
    generator = random.Random(0)
    bits = [generator.randrange(8 * (store_path / DATA_FILE).stat().st_size) for _ in range(12)]
    assert all_are_refused(store_path, "full", bits)


def test_a_flipped_bit_in_lmdbs_structure_is_refused_by_the_quick_check(store_path):
    manifest = Store(store_path).manifest
    page_bits = 8 * manifest.page_bytes
    generator = random.Random(0)
    bits = [page * page_bits + generator.randrange(page_bits) for page in manifest.index_pages for _ in range(3)]
    bits += [bit for byte in (16, 24, 40, 56, 120) for bit in (8 * byte, page_bits + 8 * byte + 5)]
    data = (store_path / DATA_FILE).read_bytes()
    starts = [at for at in range(len(data)) if data.startswith(b"ESMR", at)]
    assert len(starts) >= manifest.num_blocks
    bits += [8 * start + bit for start in starts[:2] for bit in (*range(3, 8 * HEADER_BYTES, 9), 8 * 300 + 7)]
    assert all_are_refused(store_path, "quick", bits)


@pytest.mark.parametrize("left", [0, 4096, -1])
def test_a_truncated_store_is_refused_before_lmdb_opens_it(store_path, left, monkeypatch):
    before = Store(store_path)
    data_file = store_path / DATA_FILE
    size = data_file.stat().st_size
    os.truncate(data_file, left if left >= 0 else size + left)
    monkeypatch.setattr(lmdb, "open", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(DataError, match="truncated or replaced"):
        Store(store_path)
    with pytest.raises(DataError, match="truncated or replaced"):
        before.sequence(0)


def test_a_store_without_its_parts_is_refused(store_path):
    (store_path / DATA_FILE).unlink()
    with pytest.raises(DataError, match=r"data\.mdb: can't be read"):
        Store(store_path)
    (store_path / MANIFEST_FILE).unlink()
    with pytest.raises(DataError, match=r"not a store, it has no manifest\.json"):
        Store(store_path)
    with pytest.raises(DataError, match="no such folder; build one with: esmeray data convert"):
        Store(store_path / "absent")


def test_the_checksum_is_of_the_content_alone(tmp_path, sample, pristine_store):
    # The same records with another file name, layout and memory map.
    lines = [f">{name} described\r\n{sequence[:40]}\r\n{sequence[40:]}\r\n" for name, sequence in sample]
    (tmp_path / "other.fasta").write_bytes("".join(lines).encode())
    convert([str(tmp_path / "other.fasta")], tmp_path / "same", IngestSection())
    other = make_store(tmp_path, [*sample[:-1], (sample[-1][0], sample[-1][1] + "A")])
    assert Store(tmp_path / "same").checksum == Store(pristine_store).checksum != Store(other).checksum


def test_a_staged_store_is_the_same_and_is_copied_once(store_path, tmp_path):
    staged = stage_store(store_path, tmp_path / "local")
    assert Store(staged, verify="full").checksum == Store(store_path).checksum
    written = (staged / DATA_FILE).stat().st_mtime_ns
    assert stage_store(store_path, tmp_path / "local") == staged
    assert (staged / DATA_FILE).stat().st_mtime_ns == written
    assert [path.name for path in (tmp_path / "local").iterdir()] == [staged.name]
    damage_record(staged, 9)
    again = Store(stage_store(store_path, tmp_path / "local"), verify="full")
    assert again.path == staged and again.checksum == Store(store_path).checksum, "a damaged copy is made again"


def test_a_damaged_original_is_refused_and_not_staged(store_path, tmp_path):
    damage_record(store_path, 9)
    with pytest.raises(DataError, match="checksum"):
        stage_store(store_path, tmp_path / "local")
    assert list((tmp_path / "local").iterdir()) == []


def test_a_node_without_room_is_refused_before_copying(store_path, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(reader.shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with pytest.raises(ResourceError, match="no space left"):
        stage_store(store_path, tmp_path / "local")


def test_any_flipped_bit_of_a_manifest_is_noticed(store_path):
    # A flip between two kinds of white space does not change the manifest's content.
    noticed = refuse_silence(store_path / "manifest.json", lambda: signed_json(Store(store_path).manifest), count=100)
    assert noticed > 90


def test_a_manifest_of_another_version_says_so(store_path):
    path = store_path / "manifest.json"
    content = json.loads(path.read_text()) | {"format_version": FORMAT_VERSION + 1}
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"format version {FORMAT_VERSION + 1}, but this version of Esmeray reads"):
        Store(store_path)
