"""Memory of a model's state on each device, without allocating any of it.

Rajbhandari et al. 2020 (ZeRO), section 3.1 and figure 1: with mixed precision and Adam, 2 bytes a parameter for
weights, 2 for gradients and 12 for the optimizer (in fp32 4, 4 and 8); ZeRO-1 divides the optimizer state over the
devices, ZeRO-2 the gradients too, ZeRO-3 the weights too. Muon keeps no second moment, 4 bytes fewer. Activations,
buckets and the allocator's slack come on top. Here gradients are added up in fp32 from ZeRO-1 on (grad_accum_dtype in
the shipped settings): 4 bytes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from esmeray.dataset.labels.label_space import LabelSpace
from esmeray.model.backbones.facts import BackboneFacts, check_not_frozen, chosen_layers, esm_facts
from esmeray.model.backbones.source import esm_settings, source_type
from esmeray.model.tasks.classifier_settings import check_pooling, loss_name
from esmeray.train_config.classifier_schema import ClassifierSection
from esmeray.train_config.schema import BackboneSection, ModelSection

if TYPE_CHECKING:
    from esmeray.model.tasks.base import TaskModel

_FP32_BYTES = 4
KEPT_VECTORS: dict[bool | str, float] = {False: 16.0, "selective": 10.0, True: 1.0}
"""Vectors of hidden_size channels that a token leaves in a layer of ESM-2 for the backward pass, by
``gradient_checkpointing``."""


class ParameterCount(NamedTuple):
    """Parameters of a model, those that the optimizer moves, and those of them in matrices of the backbone's layers."""

    total: int
    trainable: int
    matrices: int


class MemoryEstimate(NamedTuple):
    """Parameters of a run, and bytes of its model's state on each device.

    ``optimizer_bytes`` are 0 if it is offloaded; each worker then keeps ``host_optimizer_bytes`` in host memory.
    """

    parameters: ParameterCount
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    host_optimizer_bytes: int


def count_masked_lm_parameters(section: ModelSection) -> ParameterCount:
    """Parameters of a masked language model.

    Raises ConfigError (the backbone is wrong, or does not go with the task) or ResourceError (the hub is not reached).
    """
    if not _is_plain_esm2(section.backbone):
        from esmeray.model.tasks.masked_lm import MaskedLM  # here: torch and transformers, which ESM-2 does not need

        return _counted(MaskedLM.build(section, seed=0, empty=True))
    settings = esm_settings(section.backbone)
    D, V = settings["hidden_size"], settings["vocab_size"]
    # A dense layer, a norm and the biases; tied output weights are those of the embedding.
    head = D * D + 3 * D + V + (0 if settings["tie_word_embeddings"] else V * D)
    return _with_heads(section.backbone, esm_facts(settings), head, head)


def count_autoencoder_parameters(section: ModelSection) -> ParameterCount:
    """Parameters of an autoencoder; raises as :func:`count_masked_lm_parameters`."""
    if not _is_plain_esm2(section.backbone):
        from esmeray.model.tasks.autoencoder import ESM2Autoencoder

        return _counted(ESM2Autoencoder.build(section, seed=0, empty=True))
    settings = esm_settings(section.backbone)
    D, V = settings["hidden_size"], settings["vocab_size"]
    stack = sum(inputs * outputs for inputs, outputs in pairwise([D, *section.autoencoder.hidden_sizes]))
    trained_head = V * D if section.autoencoder.residue_loss_weight else 0
    # The decoder is the encoder's mirror image.
    return _with_heads(section.backbone, esm_facts(settings), 2 * stack + V * D, 2 * stack + trained_head)


def count_diffusion_parameters(section: ModelSection, num_labels: int) -> ParameterCount:
    """Parameters of sequence diffusion with this many classes to condition on; raises as the others do."""
    from esmeray.model.tasks.diffusion import SequenceDiffusion  # here: torch and transformers

    return _counted(SequenceDiffusion.build(section, 0, tuple(map(str, range(num_labels))), empty=True))


def _is_plain_esm2(section: BackboneSection) -> bool:
    return source_type(section) == "esm" and not section.padded


def _with_heads(section: BackboneSection, facts: BackboneFacts, heads: int, trained_heads: int) -> ParameterCount:
    return ParameterCount(facts.parameters + heads, _trained(section, facts) + trained_heads, _matrices(section, facts))


def _trained(section: BackboneSection, facts: BackboneFacts) -> int:
    return 0 if section.frozen else facts.parameters - facts.unused


def _matrices(section: BackboneSection, facts: BackboneFacts) -> int:
    return 0 if section.frozen else sum(inputs * outputs for inputs, outputs in facts.linear.values())


def _counted(model: TaskModel) -> ParameterCount:
    from esmeray.model.parameter_groups import layer_matrices  # here: it imports torch

    parameters = list(model.parameters())
    return ParameterCount(
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
        sum(p.numel() for p in layer_matrices(model.backbone.layers)),
    )


def count_classifier_parameters(
    section: ModelSection, facts: BackboneFacts, label_space: LabelSpace, num_prefix: int
) -> ParameterCount:
    """Parameters of a classifier. Raises ConfigError where its head or adapter does not go with the rest."""
    classifier, lora = section.classifier, section.backbone.lora
    # Counted before anything is loaded: what does not go together is refused here, and not after a download.
    loss_name(classifier, label_space.kind)
    check_pooling(classifier, label_space.kind, num_prefix=num_prefix, causal=facts.causal)
    head = _head_parameters(classifier, facts.hidden_size, label_space.num_outputs)
    if not lora.rank:
        return _with_heads(section.backbone, facts, head, head)
    check_not_frozen(section.backbone.frozen)
    chosen = chosen_layers(list(facts.linear), lora.targets)
    # Two matrices a layer, of rank rows each; nothing else of the backbone is trained.
    adapter = lora.rank * sum(sum(facts.linear[name]) for name in chosen)
    return ParameterCount(facts.parameters + adapter + head, adapter + head, adapter)


def _head_parameters(section: ClassifierSection, channels: int, outputs: int) -> int:
    count = 0
    attentive = section.pooling == "light_attention"
    if attentive:  # two convolutions
        count += 2 * (channels * channels * section.light_attention_kernel + channels)
        channels *= 2
    if section.head == "mlp":  # the hidden layer, and the norm after light attention
        count += (channels + 1 + 2 * attentive) * section.hidden_size
        channels = section.hidden_size
    return count + (channels + 1) * outputs


def estimate_memory(
    count: ParameterCount,
    *,
    stage: int,
    world_size: int,
    precision: str,
    offload_optimizer: bool = False,
    optimizer: str = "adamw",
    weight_mean: bool = False,
) -> MemoryEstimate:
    """Bytes of weights, gradients and optimizer state under ZeRO of a stage from 0 to 3."""
    total, trainable, matrices = count
    mixed = precision != "fp32"
    element_bytes = 2 if mixed else 4
    moments = 2 * trainable - (matrices if optimizer == "muon" else 0)
    # In mixed precision the optimizer has its own fp32 copy of the weights, from which the bf16 ones are rounded.
    state_bytes = _FP32_BYTES * (moments + (mixed + weight_mean) * trainable)

    def share(size_bytes: int, from_stage: int) -> int:
        return -(-size_bytes // world_size) if stage >= from_stage else size_bytes

    optimizer_bytes = share(state_bytes, 1)
    return MemoryEstimate(
        parameters=count,
        parameter_bytes=share(element_bytes * total, 3),
        # Without ZeRO the wrapper keeps gradients in the weights' own dtype.
        gradient_bytes=share((_FP32_BYTES if stage else element_bytes) * trainable, 2),
        optimizer_bytes=0 if offload_optimizer else optimizer_bytes,
        host_optimizer_bytes=optimizer_bytes if offload_optimizer else 0,
    )


def activation_bytes_per_token(layers: int, hidden_size: int, precision: str, checkpointing: bool | str) -> float:
    """Bytes that a token of a micro-batch keeps until its backward pass; of a layer computed again, all."""
    recomputed = KEPT_VECTORS[False] - KEPT_VECTORS[checkpointing]
    return (2 if precision != "fp32" else 4) * hidden_size * (layers * KEPT_VECTORS[checkpointing] + recomputed)
