"""The cache finds the rows of a sequence by its key, independent of the job that wrote them."""

import numpy as np
import pytest

from esmeray.common.errors import DataError
from esmeray.dataset.embeddings.cache import FeatureStore, bound_cache, merge_shards, write_shard
from tests.damage import refuse_silence

KEYS = np.array([[7, 2**64 - 1], [2**64 - 1, 2], [7, 1]], dtype=np.uint64)
"""Keys; some share one half."""


def key(first: int, second: int = 9) -> np.ndarray:
    return np.array([[first, second]], dtype=np.uint64)


def features(seed: int, rows: list[int], channels: int = 4) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.normal(size=(count, channels)).astype(np.float32) for count in rows]


def test_shards_are_one_store_whose_rows_come_in_the_order_asked_for(tmp_path):
    assert not FeatureStore(tmp_path / "nothing").has(KEYS).any()
    first, second = features(0, [2, 1, 5]), features(1, [2])
    write_shard(tmp_path, "a", KEYS, first)
    write_shard(tmp_path, "b", key(5), second)
    store = FeatureStore(tmp_path)
    assert len(store) == 4
    asked = np.concatenate([KEYS[2:], key(4), key(5), KEYS[1:2], key(0), key(7), key(2**64 - 1)])
    np.testing.assert_array_equal(store.has(asked), [True, False, True, True, False, False, False])
    wanted = np.concatenate([KEYS[[2, 0, 0, 1]], key(5)])
    for rows, expected in zip(store.rows(wanted), [first[2], first[0], first[0], first[1], second[0]], strict=True):
        np.testing.assert_array_equal(rows, expected)
        assert not rows.flags.writeable
    with pytest.raises(IndexError):
        next(store.rows(key(1)))


@pytest.mark.parametrize("name", ["shard-a.safetensors", "shard-b.safetensors"])
def test_a_flipped_bit_is_noticed(tmp_path, name):
    for shard, number in (("a", 0), ("b", 1)):
        write_shard(tmp_path, shard, KEYS + np.uint64(number), features(number, [1, 3, 2]))

    def read():
        store = FeatureStore(tmp_path)
        return [list(store.rows(KEYS)), list(store.rows(KEYS + np.uint64(1)))]

    assert refuse_silence(tmp_path / name, read, 60) > 50  # a flip in the name of a checksum is harmless


def test_merged_shards_are_one_with_the_same_rows(tmp_path):
    made = features(0, [2, 1, 5])
    write_shard(tmp_path, "a", KEYS, made)
    write_shard(tmp_path, "b", key(5), features(1, [1]))
    merge_shards(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    np.testing.assert_array_equal(np.concatenate([*FeatureStore(tmp_path).rows(KEYS)]), np.concatenate(made))


def test_shards_of_other_channels_do_not_mix(tmp_path):
    write_shard(tmp_path, "a", KEYS, features(0, [1, 1, 1]))
    write_shard(tmp_path, "b", key(5), features(0, [1], channels=8))
    with pytest.raises(DataError, match=r"\[4, 8\] channels"):
        FeatureStore(tmp_path)


def test_the_oldest_shards_leave_a_full_cache(tmp_path):
    for number, name in enumerate("abc"):
        write_shard(tmp_path / "model", name, KEYS + np.uint64(number), features(number, [1, 1, 1]))
    size = (tmp_path / "model" / "shard-a.safetensors").stat().st_size
    assert bound_cache(tmp_path, 2 * size) == 1
    assert len(FeatureStore(tmp_path / "model")) == 6
