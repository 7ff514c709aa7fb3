"""Rows of a sequence are found again by its hash, whoever wrote them and whenever."""

import numpy as np
import pytest

from common.errors import DataError
from dataset.embeddings.cache import FeatureStore, bound_cache, write_shard

HASHES = np.array([7, 2**64 - 1, 3], dtype=np.uint64)


def features(seed: int, rows: list[int], channels: int = 4) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.normal(size=(count, channels)).astype(np.float32) for count in rows]


def test_rows_come_back_in_the_order_asked_for(tmp_path):
    made = features(0, [2, 1, 5])
    write_shard(tmp_path, "a", HASHES, made)
    store = FeatureStore(tmp_path)
    assert (len(store), store.channels) == (3, 4)
    asked = [2, 0, 0, 1]
    for place, rows in zip(asked, store.rows(HASHES[asked]), strict=True):
        np.testing.assert_array_equal(rows, made[place])
        assert not rows.flags.writeable


def test_shards_are_one_store(tmp_path):
    first, second = features(0, [1, 1, 1]), features(1, [2])
    write_shard(tmp_path, "a", HASHES, first)
    write_shard(tmp_path, "b", np.array([5], dtype=np.uint64), second)
    store = FeatureStore(tmp_path)
    np.testing.assert_array_equal(
        store.has(np.array([3, 4, 5, 2**64 - 1, 0], dtype=np.uint64)), [True, False, True, True, False]
    )
    np.testing.assert_array_equal(next(store.rows(np.array([5], dtype=np.uint64))), second[0])


def test_what_is_not_there_is_said(tmp_path):
    assert not FeatureStore(tmp_path / "nothing").has(HASHES).any()
    write_shard(tmp_path, "a", HASHES, features(0, [1, 1, 1]))
    with pytest.raises(KeyError, match="no rows"):
        next(FeatureStore(tmp_path).rows(np.array([1], dtype=np.uint64)))


def test_a_flipped_bit_or_a_lost_end_is_noticed(tmp_path):
    made = features(0, [1, 1, 1])
    write_shard(tmp_path, "a", HASHES, made)
    path = tmp_path / "shard-a.safetensors"
    content = path.read_bytes()
    place = content.index(made[1].tobytes())
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(DataError, match=r"shard-a\.safetensors: damaged, .* remove the file"):
        next(FeatureStore(tmp_path).rows(HASHES))
    path.write_bytes(content[: place + 8])
    with pytest.raises(DataError, match="damaged"):
        FeatureStore(tmp_path)


def test_shards_of_other_channels_do_not_mix(tmp_path):
    write_shard(tmp_path, "a", HASHES, features(0, [1, 1, 1]))
    write_shard(tmp_path, "b", np.array([5], dtype=np.uint64), features(0, [1], channels=8))
    with pytest.raises(DataError, match=r"\[4, 8\] channels"):
        FeatureStore(tmp_path)


def test_the_oldest_shards_leave_a_full_cache(tmp_path):
    for number, name in enumerate("abc"):
        write_shard(tmp_path / "model", name, HASHES + np.uint64(number), features(number, [1, 1, 1]))
    size = (tmp_path / "model" / "shard-a.safetensors").stat().st_size
    assert bound_cache(tmp_path, 2 * size) == 1
    assert len(FeatureStore(tmp_path / "model")) == 6
