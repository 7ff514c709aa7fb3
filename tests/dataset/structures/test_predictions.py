"""Predicted structures are read while whoever predicts merges their shards."""

from pathlib import Path

import numpy as np
import pytest

from esmeray.dataset.embeddings import cache
from esmeray.dataset.embeddings.cache import write_shard
from esmeray.dataset.structures.predictions import PredictedStructures

KEYS = np.array([[3, 1], [7, 2]], dtype=np.uint64)


def test_shards_that_are_removed_while_they_are_opened_are_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = [np.zeros((4, 13), np.float16)] * 2
    for number in range(2):
        write_shard(tmp_path, f"small{number}", KEYS, rows)
    write_shard(tmp_path, "zmerged", KEYS, rows)
    open_arrays = cache.open_arrays

    def removed_first(path: Path):
        if "small" in path.name:
            path.unlink()
        return open_arrays(path)

    monkeypatch.setattr(cache, "open_arrays", removed_first)
    assert PredictedStructures(tmp_path).has(KEYS).all()
