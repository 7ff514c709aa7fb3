"""Features are invariant to rigid motions and to packing, and neighbours are the nearest residues."""

import numpy as np
import pytest
import torch

from esmeray.dataset.packed_batch import CHAINS, COORDINATES
from esmeray.dataset.structures.sample import _built
from esmeray.dataset.structures.store import Structure
from esmeray.inference.design.sampling import structure_batch
from esmeray.model.section import StructureEncoderSection
from esmeray.model.structures.encoder import StructureEncoder
from esmeray.model.structures.geometry import known_residues, nearest, residue_features
from tests.structures import folds

FOLDS = folds(3)


def encoder(neighbours: int = 12) -> StructureEncoder:
    torch.manual_seed(0)
    section = StructureEncoderSection(hidden_size=32, layers=2, neighbours=neighbours)
    return StructureEncoder(section).eval()


def moved(coordinates: torch.Tensor, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, generator=draw))
    rotation *= torch.linalg.det(rotation)
    return coordinates @ rotation.T + 50 * torch.randn(3, generator=draw)


@pytest.mark.parametrize("seed", range(2))
def test_rotation_and_translation_change_nothing_and_reflection_does(seed: int):
    batch, model = structure_batch(FOLDS), encoder()
    with torch.no_grad():
        still = model(batch)
        moved_features = model(batch.adding({COORDINATES: moved(batch.by_token[COORDINATES], seed)}))
        mirrored = model(batch.adding({COORDINATES: batch.by_token[COORDINATES] * torch.tensor([1.0, 1, -1])}))
    scale = still.abs().max()
    torch.testing.assert_close(moved_features, still, rtol=1e-4, atol=float(1e-4 * scale))
    assert (mirrored - still).abs().max() > 0.1 * scale


@pytest.mark.parametrize("neighbours", [12, 500])
def test_packed_structures_give_the_same_features_as_alone(neighbours: int):
    model = encoder(neighbours)
    with torch.no_grad():
        together = model(structure_batch(FOLDS))
        alone = torch.cat([model(structure_batch([fold])) for fold in FOLDS])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=float(1e-5 * alone.abs().max()))


def test_neighbours_are_the_nearest_residues_with_coordinates(monkeypatch: pytest.MonkeyPatch):
    batch = structure_batch(FOLDS)
    coordinates = batch.by_token[COORDINATES].clone()
    coordinates[7] = torch.nan
    batch = batch.adding({COORDINATES: coordinates})
    known = known_residues(coordinates)
    ca = coordinates[:, 1].nan_to_num()
    monkeypatch.setattr("esmeray.model.structures.geometry._AT_ONCE", 1000)  # in many parts
    neighbours = nearest(ca, known, batch, 6)
    apart = torch.cdist(ca.double(), ca.double())
    segments = batch.segment_ids()
    apart[(segments[:, None] != segments) | ~known | ~known[:, None]] = torch.inf
    wanted = apart.topk(6, largest=False)
    got = apart.gather(1, neighbours.indices)
    assert torch.equal(neighbours.known, wanted.values.isfinite())
    torch.testing.assert_close(got[neighbours.known].sort().values, wanted.values[neighbours.known].sort().values)
    assert not neighbours.known[7].any() and not neighbours.known[0].any()


def test_torsions_are_those_that_the_fold_was_built_with():
    random = np.random.default_rng(0)
    phi, psi = (np.radians(random.uniform(-180, 180, (1, 30))) for _ in range(2))
    atoms = torch.from_numpy(_built(phi, psi)[0]).float()
    blank = np.zeros(30, np.int8)
    batch = structure_batch([Structure("x", "A" * 30, atoms.numpy(), blank, blank, ("A",))])
    known = known_residues(batch.by_token[COORDINATES])
    filled = torch.where(known[:, None, None], batch.by_token[COORDINATES], 0.0)
    rows = residue_features(filled, known, batch.by_token[CHAINS], batch)[1:-1]
    torch.testing.assert_close(rows[1:, 0], torch.from_numpy(np.sin(phi[0, 1:])).float(), rtol=0, atol=1e-4)
    torch.testing.assert_close(rows[:-1, 3], torch.from_numpy(np.cos(psi[0, :-1])).float(), rtol=0, atol=1e-4)
    torch.testing.assert_close(rows[1:, 5], -torch.ones(29), rtol=0, atol=1e-4)
    assert rows[0, :2].eq(0).all()


def test_residues_without_coordinates_get_the_learned_vector():
    batch, model = structure_batch(FOLDS), encoder()
    coordinates = batch.by_token[COORDINATES].clone()
    coordinates[5:9] = torch.nan
    out = model(batch.adding({COORDINATES: coordinates}))
    assert torch.equal(out[5:9], model.unknown.expand(4, -1))
    out.square().sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
