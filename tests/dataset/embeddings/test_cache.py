"""Features of a sequence are found again by its hash, whoever wrote them and whenever."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import DataError
from dataset.embeddings.cache import FEATURES_FILE, MANIFEST_FILE, FeatureStore, write_shard

HASHES = np.array([7, 2**64 - 1, 3], dtype=np.uint64)


def features(seed: int, rows: list[int], channels: int = 4) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.normal(size=(count, channels)).astype(np.float32) for count in rows]


def test_features_come_back_in_the_order_asked_for(tmp_path):
    made = features(0, [2, 1, 5])
    write_shard(tmp_path, "a", HASHES, reversed(list(enumerate(made))))
    store = FeatureStore(tmp_path)
    assert len(store) == 3
    asked = [2, 0, 0, 1]
    for place, rows in zip(asked, store.rows(HASHES[asked]), strict=True):
        np.testing.assert_array_equal(rows, made[place])
        assert not rows.flags.writeable


def test_shards_are_one_store(tmp_path):
    first, second = features(0, [1, 1, 1]), features(1, [2])
    write_shard(tmp_path, "a", HASHES, enumerate(first))
    write_shard(tmp_path, "b", np.array([5], dtype=np.uint64), enumerate(second))
    store = FeatureStore(tmp_path)
    np.testing.assert_array_equal(
        store.has(np.array([3, 4, 5, 2**64 - 1, 0], dtype=np.uint64)), [True, False, True, True, False]
    )
    np.testing.assert_array_equal(next(store.rows(np.array([5], dtype=np.uint64))), second[0])


def test_what_is_not_there_is_said(tmp_path):
    assert not FeatureStore(tmp_path / "nothing").has(HASHES).any()
    write_shard(tmp_path, "a", HASHES, enumerate(features(0, [1, 1, 1])))
    with pytest.raises(KeyError, match="no features"):
        next(FeatureStore(tmp_path).rows(np.array([1], dtype=np.uint64)))


def test_a_flipped_bit_is_noticed(tmp_path):
    write_shard(tmp_path, "a", HASHES, enumerate(features(0, [1, 1, 1])))
    path = tmp_path / "shard-a" / FEATURES_FILE
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"features\.bin: damaged, .* remove the folder"):
        FeatureStore(tmp_path)
    (tmp_path / "shard-a" / MANIFEST_FILE).unlink()
    with pytest.raises(DataError, match="damaged"):
        FeatureStore(tmp_path)


def test_a_failure_while_features_are_made_leaves_no_shard(tmp_path):
    def breaking():
        yield 0, np.zeros((1, 4), dtype=np.float32)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        write_shard(tmp_path, "a", HASHES, breaking())
    assert len(FeatureStore(tmp_path)) == 0


def test_shards_of_other_channels_do_not_mix(tmp_path):
    write_shard(tmp_path, "a", HASHES, enumerate(features(0, [1, 1, 1])))
    write_shard(tmp_path, "b", np.array([5], dtype=np.uint64), enumerate(features(0, [1], channels=8)))
    with pytest.raises(DataError, match=r"\[4, 8\] channels"):
        FeatureStore(tmp_path)
