"""Backbones from CA alone are near the real ones, also at breaks and ends; reading with ``complete`` gives them."""

from pathlib import Path

import numpy as np

from esmeray.dataset.structures.ca_trace import completed
from esmeray.dataset.structures.files import read_structures
from esmeray.dataset.structures.store import StructureCounts
from tests.structures import EACH, folds


def rmsd(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Of each atom, over residues that are known."""
    known = np.isfinite(found + wanted).all((1, 2))
    return np.sqrt(np.square(found - wanted)[known].sum(-1).mean(0))


def test_real_backbones_are_rebuilt_from_their_ca(shared_data: Path):
    pairs = []
    for path in sorted((shared_data / "structures" / "test").glob("*.pdb.gz"))[::4]:
        pairs += [
            (completed(each.coordinates[:, 1]), each.coordinates)
            for each in read_structures(path, EACH, StructureCounts())
        ]
    found, wanted = (np.concatenate(each) for each in zip(*pairs, strict=True))
    n, ca, c, o = rmsd(found, wanted)
    assert len(found) > 3000 and np.isfinite(found).all((1, 2)).mean() > 0.98
    assert n < 0.25 and ca == 0 and c < 0.3 and o < 0.95, (n, c, o)
    bonds = np.linalg.norm(found[:, [1, 2, 2]] - found[:, [0, 1, 3]], axis=-1)  # N-CA, CA-C, C-O
    np.testing.assert_allclose(np.nanmean(bonds, axis=0), (1.46, 1.52, 1.23), atol=0.02)


def test_ends_and_breaks_are_completed_like_the_middle():
    ideal = folds(1)[0].coordinates
    gap = np.concatenate([ideal[:20], ideal[22:]])
    found = completed(gap[:, 1])
    assert np.isfinite(found).all() and (rmsd(found, gap)[[0, 2, 3]] < (0.3, 0.4, 1.1)).all()
    np.testing.assert_array_equal(found[20:], completed(ideal[22:, 1]))
    steps = np.linalg.norm(found[1:, 0] - found[:-1, 2], axis=-1)
    assert steps[19] > 2.5 and (np.delete(steps, 19) < 1.6).all()


def test_what_has_too_few_neighbours_stays_unknown():
    ca = np.arange(12, dtype=np.float32).reshape(4, 3) * 5
    for few in (ca, ca[:0], folds(1)[0].coordinates[:3, 1], np.zeros((5, 3), np.float32)):
        found = completed(few)
        np.testing.assert_array_equal(found[:, 1], few)
        assert np.isnan(found[:, [0, 2, 3]]).all()
