"""The multi-label network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from inference.function.network import load_network, probabilities, save_network, train_network
from train_config.function_schema import NetworkSection

SETTINGS = NetworkSection(hidden_size=32, epochs=20, batch_size=32, learning_rate=1e-2)


@pytest.fixture(scope="module")
def case():
    """Terms 0 to 9 follow from the signs of channels; 10 to 19 are rare, and not to be learnt."""
    random = np.random.default_rng(0)
    vectors_NC = random.normal(size=(300, 10)).astype(np.float32)
    terms = np.zeros((300, 20), bool)
    terms[:, :10] = vectors_NC > 0.5
    terms[:2, 10:] = True
    return vectors_NC, csr_array(terms), np.arange(10), np.arange(300) < 240


def test_it_learns_the_terms_that_it_is_given_and_no_others(case, tmp_path):
    vectors_NC, terms, *_ = case
    network = train_network(*case, np.ones(20), SETTINGS, 0)
    found = probabilities(network, vectors_NC[240:], 20).toarray()
    assert ((found[:, :10] > 0.5) == terms[240:, :10].toarray()).mean() > 0.9 and not found[:, 10:].any()
    save_network(network, tmp_path / "network.safetensors")
    again = probabilities(load_network(tmp_path / "network.safetensors"), vectors_NC[240:], 20).toarray()
    assert (again == found).all()


def test_seeds_decide_the_weights_and_the_callers_random_state_is_left_alone(case):
    before = torch.random.get_rng_state()
    first, second, other = (
        train_network(*case, np.ones(20), SETTINGS.model_copy(update={"epochs": 2}), seed).state_dict()
        for seed in (1, 1, 2)
    )
    assert all((first[name] == second[name]).all() for name in first)
    assert (first["output.weight"] != other["output.weight"]).any()
    assert (torch.random.get_rng_state() == before).all()


def test_targets_are_dense_a_batch_at_a_time(case, monkeypatch):
    rows = []
    dense = csr_array.toarray
    monkeypatch.setattr(csr_array, "toarray", lambda self, *a, **k: rows.append(self.shape[0]) or dense(self, *a, **k))
    train_network(*case, np.ones(20), SETTINGS.model_copy(update={"epochs": 1}), 0)
    assert rows and max(rows) <= SETTINGS.batch_size
