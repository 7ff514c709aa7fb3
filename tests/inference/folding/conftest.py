"""A small predictor of structures for the tests of this folder."""

from pathlib import Path

import pytest
import torch
from transformers import EsmFold2Config, EsmFold2Model

from tests.structures import save_esmfold


@pytest.fixture(scope="session")
def esmfold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_esmfold(tmp_path_factory.mktemp("esmfold"))


@pytest.fixture(scope="session")
def esmfold2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ESMFold2 of one layer of each kind and two samples, weights drawn at random."""
    folder = tmp_path_factory.mktemp("esmfold2")
    torch.manual_seed(0)
    one = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    atoms = {**one, "hidden_size": 64, "output_dim": 32}
    denoiser = {**one, "hidden_size": 32, "fourier_dim": 8, "pair_intermediate_size": 32, "atom_encoder": atoms}
    config = EsmFold2Config(
        **{"hidden_size": 16, "pairwise_hidden_size": 16, "single_inputs_size": 99, "num_loops": 1},
        **{"pair_transition_intermediate_size": 32, "folding_trunk_num_hidden_layers": 1, "parcae_num_coda_layers": 1},
        atom_encoder=atoms,
        structure_head={"num_diffusion_samples": 2, "inference_num_steps": 4, "diffusion_module": denoiser},
        confidence_head={"num_hidden_layers": 1},
        msa_encoder={**one, "hidden_size": 16, "outer_hidden_size": 8, "head_dim": 8},
        lm_encoder={"num_hidden_layers": 1},
        esmc_config={**one, "model_type": "esmc", "hidden_size": 16},
    )
    EsmFold2Model(config).save_pretrained(folder)
    return folder
