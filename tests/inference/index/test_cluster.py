"""Actors of a cluster that search the parts of an index find the hits of one process, also if an actor is killed."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import ray

from esmeray.cluster.section import RaySection
from esmeray.common.errors import ConfigError, ResourceError
from esmeray.dataset.embeddings.reader import read_embeddings
from esmeray.inference.index import build
from esmeray.inference.index.build import IndexSection, make_index, memory_index
from esmeray.inference.index.cluster import _opened_part, merged, on_cluster
from esmeray.inference.index.index import best
from esmeray.inference.index.metric import prepared
from esmeray.inference.index.search import open_index
from tests.embeddings import make_embeddings, random_vectors

pytestmark = pytest.mark.slow
CHANNELS = 16
QUERIES = np.concatenate([random_vectors(1400, CHANNELS)[:50], random_vectors(550, CHANNELS, seed=1)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An exact index and a compressed one, with five parts each."""
    folder = tmp_path_factory.mktemp("indexes")
    vectors = random_vectors(1400, CHANNELS)
    vectors[700:] = vectors[:700]  # each row has an equal one in another part
    source = make_embeddings(folder / "source", vectors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "PART_BYTES", 300 * CHANNELS * 4)
        for kind in ("exact", "compressed"):
            make_index([source], IndexSection(output=folder / kind, kind=kind, metric="l2"))
    return {name: folder / name for name in ("source", "exact", "compressed")}


def test_two_actors_give_the_hits_of_one_process_also_while_one_is_killed(ray_address: str, folders):
    index = open_index(folders["exact"])
    rows, scores = index.search(QUERIES, 7)
    with on_cluster(index, folders["exact"], RaySection(address=ray_address), 2, None) as cluster:
        first, second = cluster._pools
        victim = second._ready[0]
        killed = threading.Timer(0.05, ray.kill, [victim])
        killed.start()
        until_s = time.monotonic() + 60
        while len(second._ready) == 1:  # until a replacement has answered
            found, values = cluster.search(QUERIES, 7)
            np.testing.assert_array_equal(found, rows)
            np.testing.assert_array_equal(values, scores)
            assert time.monotonic() < until_s
        assert len(first._ready) == 1 and cluster.ids(found[0]) == index.ids(rows[0])


@pytest.mark.parametrize("kind", ["exact", "compressed"])
def test_the_merged_hits_of_parts_are_those_of_the_whole_ties_by_row(folders, kind):
    index = open_index(folders[kind])
    rows, scores = index.search(QUERIES[:64], 7)
    assert all((np.diff(one) > 0)[np.diff(values) == 0].all() for one, values in zip(rows, scores, strict=True))
    parts = [open_index(folders[kind], parts=slice(*bounds)) for bounds in ((0, 1), (1, 4), (4, 5))]
    queries = prepared("l2", QUERIES[:64])
    whole = merged([part.candidates(queries, 7) for part in parts], index.considered(7))
    for number, wanted in enumerate(rows):
        assert best(whole.rows[number], whole.scores[number], 7)[0].tolist() == wanted.tolist()


def test_what_actors_can_not_search_is_refused(ray_address: str, folders):
    exact = open_index(folders["exact"])
    in_memory = memory_index(read_embeddings(folders["source"]), "l2")
    for index, workers, error, words in [
        (exact, 5, ResourceError, "--search.workers 5: the cluster has room for 4; request fewer"),
        (in_memory, 1, ConfigError, "is not an index"),
    ]:
        refused = pytest.raises(error, match=words)
        with refused, on_cluster(index, folders["exact"], RaySection(address=ray_address), workers, None):
            pass
    with pytest.raises(ResourceError, match="the index differs between nodes"):
        _opened_part(str(folders["compressed"]), None, slice(0, 2), exact.manifest.parts[:2])
