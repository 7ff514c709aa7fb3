"""Any architecture of transformers on packed batches.

Architectures listed in :data:`esmeray.model.backbones.source.PACKED` never see padding: they use the attention
of :mod:`esmeray.model.attention.packed`, and each token gets its position. Others, T5 among them, get padded batches,
which are created and removed here.

Shape legend: T tokens in the batch, D channels, G sequences and L tokens of a padded group.
"""

import inspect
from collections.abc import Iterator, Set
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from esmeray.common.errors import ConfigError
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.model.attention.packed import PACKED_ATTENTION, packed_attention
from esmeray.model.backbones.base import Checkpointing, PackedBackbone
from esmeray.model.backbones.source import ALWAYS_PADDED, PACKED, SOURCE_KEY

AttentionInterface.register(PACKED_ATTENTION, packed_attention)

_GROUP_PADDING = 512
"""Maximum number of padding tokens per group: about the cost of one more network call."""


class HuggingFaceBackbone(PackedBackbone):
    """An architecture of transformers with AttentionInterface, on packed batches. Sets the attention in its config."""

    def __init__(self, model: PreTrainedModel, **settings: Any) -> None:
        model.config.chunk_size_feed_forward = 0  # chunking requires a divisor of the number of tokens
        model.set_attn_implementation(PACKED_ATTENTION)
        # Any other implementation would attend across sequences.
        assert model.config._attn_implementation == PACKED_ATTENTION
        super().__init__(model, **settings)
        self.causal = is_causal(model.config)
        self._first_position, reach = _positions(model)
        self.longest = min((limit for limit in (reach, _window(model.config)) if limit is not None), default=None)
        _set_checkpointing(model, not self.frozen and self.gradient_checkpointing)

    def _hidden_states(self, batch: PackedBatch, layers: Set[int]) -> dict[int, Tensor]:
        output = self.model(
            input_ids=batch.tokens[None],
            # Positions count from 0 in each sequence; transformers would count through the whole row.
            position_ids=(batch.positions + self._first_position)[None],
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
            use_cache=False,  # decoders would keep keys and values for generation
            output_hidden_states=layers != {self.num_layers} or not self.has_final_norm,
        )
        states = _states(output, self.num_layers, self.has_final_norm)
        return {layer: states[layer][0] for layer in layers}


class PaddedBackbone(PackedBackbone):
    """Any encoder or decoder of transformers; packed batches are padded for it in groups of similar length.

    Features are copied to padded rows and back. Groups are formed from the lengths on the host, so that a batch on CUDA
    has one sync point. The number of network calls differs between batches and workers, so ZeRO-3, whose workers gather
    weights together at each call, is not supported. ``model``: takes ``input_ids`` and ``attention_mask``. Raises
    ConfigError (the network has no attention mask, so that padding would change its features).
    """

    pads = True

    def __init__(self, model: PreTrainedModel, *, pad: int = 0, **settings: Any) -> None:
        parameters = inspect.signature(model.forward).parameters
        if not {"input_ids", "attention_mask"} <= parameters.keys():
            raise ConfigError(
                f"{SOURCE_KEY}: model type {model.config.model_type!r} does not accept input_ids with an "
                "attention_mask, so it can't process padded sequences; choose another model"
            )
        super().__init__(model, **settings)
        self.causal = is_causal(model.config)
        self._pad = pad
        self._settings = {"use_cache": False} if "use_cache" in parameters else {}
        _, self.longest = _positions(model)
        _set_checkpointing(model, not self.frozen and self.gradient_checkpointing)

    def _hidden_states(self, batch: PackedBatch, layers: Set[int]) -> dict[int, Tensor]:
        groups = []
        indices = []
        for indices_GL, is_token_GL in _padded_groups(batch.cu_seqlens.cpu().numpy()):  # CPU-GPU sync point
            groups.append(self._group_states(batch.tokens, indices_GL, is_token_GL, layers))
            indices.append(indices_GL[is_token_GL])
        # Invert the permutation, from the groups' order to the batch's.
        order_T = _on(np.argsort(np.concatenate(indices)), batch.tokens.device)
        rows = {layer: torch.cat([group[layer] for group in groups]) for layer in layers}
        return {layer: rows_TD.index_select(0, order_T) for layer, rows_TD in rows.items()}

    def _group_states(
        self, tokens_T: Tensor, indices_GL: NDArray[np.int64], is_token_GL: NDArray[np.bool_], layers: Set[int]
    ) -> dict[int, Tensor]:
        """Return (tokens of the group, D) after each layer, row by row."""
        device = tokens_T.device
        mask_GL = _on(is_token_GL, device)
        ids_GL = tokens_T[_on(indices_GL, device)].masked_fill(~mask_GL, self._pad)
        is_last = layers == {self.num_layers} and self.has_final_norm
        all_layers = {} if is_last else {"output_hidden_states": True}
        output = self.model(input_ids=ids_GL, attention_mask=mask_GL.long(), **self._settings, **all_layers)
        last_GLD = getattr(output, "last_hidden_state", None)
        if last_GLD is None or last_GLD.shape[:2] != ids_GL.shape:
            raise ConfigError(
                f"{SOURCE_KEY}: model type {self.config.model_type!r} does not return one vector per token; "
                "choose another model"
            )
        rows = _on(is_token_GL.ravel().nonzero()[0], device)  # by NumPy: a mask on the device would be a sync point
        states = _states(output, self.num_layers, self.has_final_norm)
        return {layer: states[layer].flatten(0, 1).index_select(0, rows) for layer in layers}


def is_causal(config: Any) -> bool:
    """Test whether a token's features depend on earlier tokens only."""
    own = getattr(config, "is_causal", None)  # decoders made bidirectional set this
    if own is not None:
        return bool(own)
    kind = config.model_type
    if kind in PACKED:
        return PACKED[kind] or bool(getattr(config, "is_decoder", False))  # BERT's classes may be decoders
    # A decoder has a causal language model in transformers and no masked one.
    return (
        kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
        and kind not in ALWAYS_PADDED
    )


def _states(output: Any, num_layers: int, has_final_norm: bool) -> dict[int, Tensor]:
    """Return hidden states by layer; the last one after the final norm, which transformers' list may lack."""
    states = dict(enumerate(output.hidden_states or ()))
    return {**states, num_layers: output.last_hidden_state} if has_final_norm else states


def _set_checkpointing(model: PreTrainedModel, enabled: Checkpointing) -> None:
    if enabled == "selective":
        raise ConfigError(
            "model.backbone.gradient_checkpointing: selective supports only ESM-2; set it to true or false"
        )
    if enabled and not model.supports_gradient_checkpointing:
        raise ConfigError(
            "model.backbone.gradient_checkpointing: transformers does not support it for model type "
            f"{model.config.model_type!r}; set it to false"
        )
    if enabled:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()  # needed by reentrant checkpointing only


def _positions(model: PreTrainedModel) -> tuple[int, int | None]:
    """Return the position of a sequence's first token, and the maximum number of tokens; None for no limit."""
    config: Any = model.config
    # Names of learnt absolute positions in transformers' modules.
    names = ("position_embeddings", "wpe", "embed_positions")
    tables = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in names and isinstance(module, nn.Embedding)
    ]
    if tables:  # the table's size is the limit, whatever the config says
        padding = tables[0].padding_idx  # RoBERTa's positions start after it (fairseq's convention)
        first = 0 if padding is None else int(padding) + 1
        reach = tables[0].num_embeddings - first
        return first, min(reach, getattr(config, "max_position_embeddings", None) or reach)
    rotary = getattr(config, "rope_parameters", None) or {}
    # Angles change beyond a certain length, which would be the longest sequence's in a batch.
    if rotary.get("rope_type") == "dynamic":
        return 0, int(config.max_position_embeddings)
    if rotary.get("rope_type") == "longrope":
        return 0, int(rotary["original_max_position_embeddings"])
    return 0, None


def _window(config: Any) -> int | None:
    """Return the attention window in tokens, if some layer has one."""
    # A config may name a window that no layer uses.
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def _padded_groups(cu_seqlens: NDArray[np.int32]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Yield groups of sequences of similar length, the longest first.

    A group has at most :data:`_GROUP_PADDING` padding tokens. Each is (G, L) int64 indices of tokens in the packed
    batch, 0 for padding, and a (G, L) bool mask.
    """
    starts_N = cu_seqlens[:-1].astype(np.int64)
    lengths_N = np.diff(cu_seqlens).astype(np.int64)
    # Longest first: the first row sets a group's width, and neighbours in this order waste least.
    descending_N = np.argsort(-lengths_N, kind="stable")
    first = 0
    while first < descending_N.size:
        longest = lengths_N[descending_N[first]]
        padding = np.cumsum(longest - lengths_N[descending_N[first:]])
        count = int(np.searchsorted(padding, _GROUP_PADDING, side="right"))
        rows_G = descending_N[first : first + count]
        is_token = np.arange(longest) < lengths_N[rows_G, None]
        yield np.where(is_token, starts_N[rows_G, None] + np.arange(longest), 0), is_token
        first += count


def _on(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)  # asynchronous: the host continues with the next group
