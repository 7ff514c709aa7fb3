"""The packed backbone is Hugging Face's EsmModel, one protein at a time, to the rounding."""

from __future__ import annotations

import copy
import gzip

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from common.errors import ConfigError, DataError
from dataset.tokens.esm import pack_sequences
from model.backbones.esm2 import EsmBackbone
from model.backbones.loading import build_backbone, load_network
from tests.model.support import (
    TINY,
    assert_near,
    masked_batch,
    random_sequences,
    save_network,
    segments,
    without_targets,
)
from train_config.schema import BackboneSection

LENGTHS = [40, 1, 7, 130, 2, 63]
SHARES = [0.15, 0.0, 0.9, 0.3, 0.5, 0.0]


@pytest.fixture(scope="module")
def reference():
    """A network with Hugging Face's own attention."""
    return load_network(BackboneSection(source="esm2_t6_8M", layers=3), seed=3).eval()


@pytest.fixture(scope="module")
def packed(reference):
    return EsmBackbone(copy.deepcopy(reference.esm)).eval()


@pytest.fixture
def batch():
    return masked_batch(random_sequences(LENGTHS), SHARES)


@torch.no_grad()
def features_alone(network, batch):
    return [network.esm(tokens[None]).last_hidden_state[0] for tokens in segments(batch.tokens, batch)]


def test_packed_features_equal_one_at_a_time(reference, packed, batch):
    assert len({(tokens == 32).float().mean().item() for tokens in segments(batch.tokens, batch)}) > 3
    with torch.no_grad():
        together = segments(packed(batch), batch)
    assert_near(together, features_alone(reference, batch))


def test_packed_features_equal_a_padded_batch(reference, packed, batch):
    rows = segments(batch.tokens, batch)
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
    with torch.no_grad():
        theirs = reference.esm(padded, attention_mask=(padded != 1).long()).last_hidden_state
        ours = segments(packed(batch), batch)
    for index, row in enumerate(ours):
        assert_near(row, theirs[index, : len(row)])


def test_features_of_a_protein_do_not_depend_on_its_neighbours(packed):
    sequences = random_sequences(LENGTHS)
    with torch.no_grad():
        forward = segments(packed(batch := pack_sequences(sequences)), batch)
        backward = segments(packed(batch := pack_sequences(sequences[::-1])), batch)[::-1]
    assert_near(forward, backward)


def test_bf16_features_point_the_same_way(reference, packed, batch):
    half = copy.deepcopy(packed).bfloat16()
    with torch.no_grad():
        for ours, theirs in zip(segments(half(batch), batch), features_alone(reference, batch), strict=True):
            cosine = nn.functional.cosine_similarity(ours.float().flatten(), theirs.flatten(), dim=0)
            assert cosine >= 0.999


def test_rotary_frequencies_stay_fp32_when_the_model_is_cast(packed):
    half = copy.deepcopy(packed).bfloat16()
    assert next(half.parameters()).dtype == torch.bfloat16
    assert torch.equal(half.model.rotary_embeddings.inv_freq, packed.model.rotary_embeddings.inv_freq)


@pytest.mark.parametrize("changes", [{"position_embedding_type": "absolute"}, {"emb_layer_norm_before": True}])
def test_esm1b_variants_match_one_at_a_time(tmp_path, batch, changes):
    network = save_network(tmp_path / "network", max_position_embeddings=140, **changes)
    backbone = build_backbone(BackboneSection(source=str(tmp_path / "network")), seed=0).eval()
    with torch.no_grad():
        together = segments(backbone(batch), batch)
    assert_near(together, features_alone(network, batch))


def test_a_protein_beyond_the_absolute_positions_is_refused(tmp_path):
    save_network(tmp_path / "network", position_embedding_type="absolute", max_position_embeddings=20)
    backbone = build_backbone(BackboneSection(source=str(tmp_path / "network")), seed=0)
    backbone(pack_sequences(random_sequences([16])))
    with pytest.raises(ConfigError, match=r"data\.max_length to at most 16"):
        backbone(pack_sequences(random_sequences([17])))


def test_wrapping_one_model_leaves_others_of_the_same_config_alone(reference):
    other = type(reference)(reference.config)
    EsmBackbone(other.esm)
    assert reference.config._attn_implementation == "sdpa"
    assert reference.esm.encoder.layer[0].attention.self.config._attn_implementation == "sdpa"


def test_random_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = load_network(TINY, seed=5).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = load_network(TINY, seed=5).state_dict(), load_network(TINY, seed=6).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["lm_head.dense.weight"], other["lm_head.dense.weight"])


def test_gradient_checkpointing_changes_no_gradient(batch):
    gradients = []
    for checkpointing in (False, True):
        network = load_network(TINY, seed=0)
        backbone = EsmBackbone(network.esm, gradient_checkpointing=checkpointing).train()
        backbone(batch).square().mean().backward()
        gradients.append({n: p.grad for n, p in backbone.named_parameters() if p.requires_grad})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_gradient_checkpointing_computes_layers_again(batch):
    backbone = EsmBackbone(load_network(TINY, seed=0).esm, gradient_checkpointing=True).train()
    calls = []
    backbone.model.encoder.layer[0].attention.self.query.register_forward_hook(lambda *_: calls.append(1))
    backbone(batch).sum().backward()
    assert len(calls) == 2


def test_a_frozen_backbone_has_no_gradient_and_never_trains(batch):
    backbone = build_backbone(TINY.model_copy(update={"frozen": True}), seed=0).train()
    assert not backbone.training and not backbone.model.training
    assert not backbone(batch).requires_grad
    assert not any(parameter.requires_grad for parameter in backbone.parameters())


def test_every_trainable_parameter_gets_a_gradient(batch):
    backbone = build_backbone(TINY, seed=0)
    backbone(without_targets(batch)).sum().backward()
    assert [n for n, p in backbone.named_parameters() if p.requires_grad and p.grad is None] == []


def test_loaded_weights_are_those_of_the_folder(tmp_path):
    network = save_network(tmp_path / "network")
    loaded = load_network(BackboneSection(source=str(tmp_path / "network")), seed=0)
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in network.state_dict().items())


def test_a_head_that_the_folder_lacks_is_drawn_from_the_seed(tmp_path):
    save_network(tmp_path / "whole").esm.save_pretrained(tmp_path / "bare")
    section = BackboneSection(source=str(tmp_path / "bare"))
    one, two, other = (load_network(section, seed).lm_head.dense.weight for seed in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_a_folder_that_lacks_a_layer_is_refused(tmp_path):
    save_network(tmp_path / "network", num_hidden_layers=1)
    path = tmp_path / "network" / "config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))
    with pytest.raises(DataError, match=r"lack esm\.encoder\.layer\.1"):
        load_network(BackboneSection(source=str(tmp_path / "network")), seed=0)


def test_weights_of_another_shape_are_refused(tmp_path):
    save_network(tmp_path / "network")
    path = tmp_path / "network" / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 64', '"intermediate_size": 128'))
    with pytest.raises(DataError, match="another shape"):
        load_network(BackboneSection(source=str(tmp_path / "network")), seed=0)


def test_truncated_weights_are_refused(tmp_path):
    save_network(tmp_path / "network")
    path = tmp_path / "network" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match="can't be read"):
        load_network(BackboneSection(source=str(tmp_path / "network")), seed=0)


def test_rotary_frequencies_of_older_checkpoints_are_kept(tmp_path):
    """Published ESM-2 weights hold a copy for each layer, rounded to fp16, which is what they were trained with."""
    network = save_network(tmp_path / "network")
    rounded = network.esm.rotary_embeddings.inv_freq.half().float()
    path = tmp_path / "network" / "model.safetensors"
    state = {name: tensor for name, tensor in load_file(path).items() if "inv_freq" not in name}
    state |= {f"esm.encoder.layer.{i}.attention.self.rotary_embeddings.inv_freq": rounded.clone() for i in range(2)}
    save_file(state, path, metadata={"format": "pt"})
    backbone = build_backbone(BackboneSection(source=str(tmp_path / "network")), seed=0)
    assert torch.equal(backbone.model.rotary_embeddings.inv_freq, rounded)


def test_real_proteins_match_one_at_a_time(reference, packed, shared_data):
    with gzip.open(shared_data / "deeploc_valid.fasta.gz", "rt") as lines:
        records = "".join(line if line.startswith(">") else line.strip() for line in lines).split(">")
    sequences = [record.split("\n", 1)[1][:700] for record in records[1:6]]
    batch = masked_batch(sequences, [0.15] * 5)
    with torch.no_grad():
        together = segments(packed(batch), batch)
    assert_near(together, features_alone(reference, batch))
