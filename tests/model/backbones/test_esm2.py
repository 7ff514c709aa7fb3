"""The packed backbone is Hugging Face's EsmModel, one protein at a time, to the rounding."""

import pytest
import torch

from esmeray.common.errors import ConfigError
from esmeray.dataset.tokens.esm import pack_sequences
from esmeray.model.backbones.loading import build_backbone
from esmeray.model.section import BackboneSection
from tests.model.small_models import save_masked_lm
from tests.model.support import assert_near, masked_batch, random_sequences, segments

LENGTHS = [40, 1, 7, 130, 2, 63]
SHARES = [0.15, 0.0, 0.9, 0.3, 0.5, 0.0]


@pytest.fixture(scope="module")
def batch():
    return masked_batch(random_sequences(LENGTHS), SHARES)


@torch.no_grad()
def features_alone(network, batch):
    return [network.esm(tokens[None]).last_hidden_state[0] for tokens in segments(batch.tokens, batch)]


@pytest.mark.parametrize("changes", [{}, {"position_embedding_type": "absolute"}, {"emb_layer_norm_before": True}])
def test_packed_features_of_esm2_and_of_esm1b_equal_one_at_a_time(tmp_path, batch, changes):
    network = save_masked_lm(tmp_path / "network", "esm", max_position_embeddings=140, **changes)
    backbone = build_backbone(BackboneSection(source=str(tmp_path / "network")), seed=0).eval()
    with torch.no_grad():
        together = segments(backbone(batch), batch)
    assert_near(together, features_alone(network, batch))


def test_a_protein_beyond_the_absolute_positions_is_refused(tmp_path):
    save_masked_lm(tmp_path / "network", "esm", position_embedding_type="absolute", max_position_embeddings=20)
    backbone = build_backbone(BackboneSection(source=str(tmp_path / "network")), seed=0)
    backbone(pack_sequences(random_sequences([16])))
    with pytest.raises(ConfigError, match=r"data\.max_length to at most 16"):
        backbone(pack_sequences(random_sequences([17])))
