"""Batches of structures: masks, dropped parts and noise depend on seed, epoch and record only."""

import numpy as np
import pytest
import torch

from esmeray.dataset.packed_batch import PackedBatch
from esmeray.dataset.structures.store import StructureStore
from esmeray.dataset.targets import IGNORED_TARGET
from esmeray.dataset.tokens.esm import MASK
from esmeray.tasks.diffusion.data import StructureSource
from esmeray.tasks.diffusion.section import DiffusionSection
from tests.structures import structure_store

RECORDS = np.arange(12)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> StructureStore:
    return structure_store(tmp_path_factory.mktemp("structures") / "store")


def made(store: StructureStore, records=RECORDS, epoch=0, training=True, max_length=1022, **settings) -> PackedBatch:
    section = DiffusionSection(**settings)
    source = StructureSource(store, section, max_length=max_length, seed=3, training=training)
    return source.batch(epoch, records).batch


def test_a_record_is_the_same_in_any_batch_and_another_in_the_next_epoch(store: StructureStore):
    whole, alone = made(store), made(store, RECORDS[5:6])
    span = slice(int(whole.cu_seqlens[5]), int(whole.cu_seqlens[6]))
    assert torch.equal(whole.tokens[span], alone.tokens)
    for name, rows in whole.by_token.items():
        torch.testing.assert_close(rows[span], alone.by_token[name], rtol=0, atol=0, equal_nan=True)
    assert whole.by_sequence["weights"][5] == alone.by_sequence["weights"][0]
    assert not torch.equal(made(store, RECORDS[5:6], epoch=1).tokens, alone.tokens)


def test_hidden_residues_are_masked_and_are_the_targets(store: StructureStore):
    batch = made(store)
    assert torch.equal((batch.tokens == MASK).nonzero()[:, 0], batch.target_positions)
    assert torch.equal((batch.by_token["targets"] != IGNORED_TARGET).nonzero()[:, 0], batch.target_positions)
    many = [made(store, RECORDS, epoch, weighting="elbo") for epoch in range(40)]
    hidden_N = [torch.bincount(b.segment_ids()[b.target_positions], minlength=b.num_sequences) for b in many]
    shares = torch.cat([hidden / (b.cu_seqlens.diff() - 2) for hidden, b in zip(hidden_N, many, strict=True)])
    assert 0.4 < shares.mean() < 0.6 and shares.min() < 0.1 and shares.max() > 0.9
    weights = torch.cat([b.by_sequence["weights"][b.segment_ids()][b.target_positions] for b in many])
    assert weights.mean().item() == pytest.approx(1, abs=0.15)


def test_coordinates_are_those_of_the_window_with_noise_in_training_alone(store: StructureStore):
    still = made(store, training=False, max_length=20)
    for first, number in zip(still.cu_seqlens[:-1].tolist(), RECORDS, strict=True):
        wanted = store.atoms(number, 0, 20)[0].astype(np.float32)
        np.testing.assert_array_equal(still.by_token["coordinates"][first + 1 : first + 21].numpy(), wanted)
    special = torch.cat([still.cu_seqlens[:-1], still.cu_seqlens[1:] - 1]).long()
    assert still.by_token["coordinates"][special].isnan().all()
    noisy, clean = (made(store, drop_share=0.0, noise=noise, max_length=20) for noise in (0.1, 0.0))
    residual = noisy.by_token["coordinates"] - clean.by_token["coordinates"]
    assert 0.09 < residual[~residual.isnan()].std() < 0.11


@pytest.mark.parametrize(("training", "share"), [(True, 0.25), (False, 0.0)])
def test_structures_are_dropped_at_the_set_rate_in_training_alone(store: StructureStore, training, share):
    batches = [made(store, epoch=epoch, training=training, drop_share=0.25) for epoch in range(60)]
    first_atoms = [batch.by_token["coordinates"][batch.cu_seqlens[:-1].long() + 1, 0, 0] for batch in batches]
    assert torch.cat(first_atoms).isnan().float().mean().item() == pytest.approx(share, abs=0.06)
