"""ESM-2 as a function of a packed batch: tokens in, one feature vector per token out.

Weights come from a size name (drawn from the seed), a local folder or the hub. The modules are Hugging Face's, so that
every checkpoint fits; the forward is Esmeray's: the embeddings here (``token_dropout`` rescales by the share of masked
tokens of each sequence, which Hugging Face takes over the batch row), the layers in :mod:`model.backbones.esm2_layers`.

Shape legend: T tokens in the batch, N sequences, D channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import EsmForMaskedLM, EsmModel
from transformers.models.esm.modeling_esm import EsmRotaryEmbedding
from transformers.utils import logging as transformers_logging

from common.errors import DataError
from dataset.packed_batch import PackedBatch
from model.backbones.base import PackedBackbone
from model.backbones.esm2_layers import encode
from model.backbones.esm2_sizes import has_random_weights, read_config, weights_folder
from model.backbones.float32_buffers import Float32Buffers
from train_config.schema import BackboneSection

_TRAINED_MASK_SHARE = 0.15 * 0.8
"""Share of <mask> tokens that ESM-2 saw in training (Rives et al. 2021; hard-coded in fair-esm and transformers)."""

_MAY_BE_MISSING = ("lm_head.", "contact_head.", "pooler.")
"""Weights of heads, which a folder may lack; these are drawn from the seed."""


class _Rotary(Float32Buffers, EsmRotaryEmbedding):
    """Hugging Face's rotary positions, whose frequencies stay fp32 when the model is cast."""


class EsmBackbone(PackedBackbone):
    """An EsmModel that takes packed batches.

    Takes over ``model``: its rotary module is replaced. Absolute positions (ESM-1b folders) are supported as well as
    rotary ones.

    Args:
        model: the Hugging Face module.
        frozen: no gradients, always in evaluation mode.
        gradient_checkpointing: recompute each layer in the backward pass.
    """

    def __init__(self, model: EsmModel, *, frozen: bool = False, gradient_checkpointing: bool = False) -> None:
        _keep_rotary_float32(model)
        super().__init__(model, frozen=frozen, gradient_checkpointing=gradient_checkpointing)

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence that absolute positions reach; None with rotary ones."""
        embeddings = self.model.embeddings
        if embeddings.position_embedding_type != "absolute":
            return None
        return int(self.config.max_position_embeddings - _first_position(embeddings))

    def forward(self, batch: PackedBatch) -> Tensor:
        """Features of every token.

        Args:
            batch: T tokens.

        Returns:
            (T, D) in the dtype of the weights: the last hidden state, after the final layer norm.

        Raises:
            ConfigError: a sequence is longer than the absolute positions of the model reach.
        """
        self._check_length(batch)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
            return encode(self.model, self._embed(batch), batch, gradient_checkpointing=checkpointing)

    def _embed(self, batch: PackedBatch) -> Tensor:
        """(T, D): what EsmEmbeddings.forward gives for each sequence alone."""
        embeddings = self.model.embeddings
        embeddings_TD = embeddings.word_embeddings(batch.tokens)
        if embeddings.token_dropout:
            embeddings_TD = _token_dropout(embeddings_TD, batch, embeddings.mask_token_id)
        if embeddings.position_embedding_type == "absolute":
            embeddings_TD = embeddings_TD + embeddings.position_embeddings(
                batch.positions + _first_position(embeddings)
            )
        if embeddings.layer_norm is not None:
            embeddings_TD = embeddings.layer_norm(embeddings_TD)
        return embeddings_TD


def _first_position(embeddings: Any) -> int:
    """Absolute positions start after the padding index (fairseq's convention)."""
    return int(embeddings.padding_idx) + 1


def _token_dropout(embeddings_TD: Tensor, batch: PackedBatch, mask_token_id: int) -> Tensor:
    """Zero <mask> embeddings and rescale the others by each sequence's own share of them.

    As EsmEmbeddings does for one sequence, in the same order of operations, so that results are equal to the bit.
    """
    is_mask_T = batch.tokens == mask_token_id
    masks_before = nn.functional.pad(is_mask_T.cumsum(0), (1, 0))
    bounds = batch.cu_seqlens.long()
    masks_N = (masks_before[bounds[1:]] - masks_before[bounds[:-1]]).float()
    kept_N = 1 - masks_N / (bounds[1:] - bounds[:-1])
    kept_T1 = kept_N[batch.segment_ids()].unsqueeze(-1)
    visible_TD = embeddings_TD.masked_fill(is_mask_T.unsqueeze(-1), 0.0)
    return (visible_TD * (1 - _TRAINED_MASK_SHARE) / kept_T1).to(embeddings_TD.dtype)


def load_backbone(section: BackboneSection, seed: int) -> EsmBackbone:
    """The packed backbone that the section means; see :func:`load_network` for what is raised."""
    return EsmBackbone(
        load_network(section, seed).esm, frozen=section.frozen, gradient_checkpointing=section.gradient_checkpointing
    )


def load_network(section: BackboneSection, seed: int) -> EsmForMaskedLM:
    """Hugging Face's module with its language-model head, in fp32 on the CPU.

    Weights that are not loaded (a size with random weights; a head that the folder lacks) depend on ``seed`` alone;
    the global random state is left as it was.

    Raises:
        ConfigError: unknown source, impossible size, not an ESM-2, no safetensors.
        DataError: safetensors that are damaged, incomplete or of another shape.
        ResourceError: the hub can't be reached.
    """
    with seeded(seed), quiet_transformers():
        if has_random_weights(section):
            return EsmForMaskedLM(read_config(section))
        network: EsmForMaskedLM = load_weights(EsmForMaskedLM, weights_folder(section))
        return network


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw CPU random numbers from ``seed`` within the block, and restore the global state after it."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        yield


def load_weights(kind: type[Any], folder: Path, **settings: Any) -> Any:
    """A Hugging Face model with the safetensors of a local folder, in fp32 on the CPU; heads may be missing.

    Args:
        kind: class of the model.
        folder: with config.json and safetensors.
        settings: more arguments of ``from_pretrained``.

    Raises:
        DataError: safetensors that are damaged, incomplete or of another shape.
    """
    try:
        loaded: Any = kind.from_pretrained(
            folder,
            output_loading_info=True,
            use_safetensors=True,
            weights_only=True,
            local_files_only=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            **settings,
        )
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the weights in {folder} can't be read ({_first_line(error)}); fetch or export them again"
        ) from error
    network, info = loaded
    missing = sorted(
        key for key in info["missing_keys"] if not key.startswith(_MAY_BE_MISSING) and ".contact_head." not in key
    )
    if missing or info["mismatched_keys"]:
        wrong = (
            f"lack {missing[0]}"
            if missing
            else f"have another shape than config.json says at {sorted(map(str, info['mismatched_keys']))[0]}"
        )
        raise DataError(f"the weights in {folder} {wrong}; fetch or export them again")
    return network


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' loading report and progress bars: what matters of it is checked and raised here."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _keep_rotary_float32(model: EsmModel) -> None:
    rotary = model.rotary_embeddings
    if rotary is None:
        return
    replacement = _Rotary(rotary.config)
    replacement.inv_freq = rotary.inv_freq  # loaded values may differ from computed ones by their fp16 rounding
    model.rotary_embeddings = replacement
