"""ESM-2 on packed batches: tokens in, one feature vector per token out.

Modules and weights have Hugging Face's layout (:mod:`esmeray.model.backbones.esm2_network`). The forward differs:
- ``token_dropout`` rescales by the share of masked tokens of each sequence (Hugging Face: of the batch row).
- Rotary tables are computed once per batch, and on the CPU the attention kernel rotates.
- GELU is one pass in place of five.

Each Linear and LayerNorm is called as a module, so that hooks (ZeRO-3 gathers weights in them), adapters and gradient
checkpointing work. Query, key and value are three products: a fused one would save 3 % of their time on the CPU.

Shape legend: T tokens in the batch, N sequences, P positions, H heads, d channels of a head, D = H d channels.
"""

from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from esmeray.dataset.packed_batch import PackedBatch
from esmeray.model.attention.cpu import RotaryTables, cpu_attention, kernel_takes
from esmeray.model.attention.packed import attend
from esmeray.model.backbones.base import PackedBackbone

_TRAINED_MASK_SHARE = 0.15 * 0.8
"""Share of <mask> tokens in ESM-2's training (Rives et al. 2021; hard-coded in fair-esm and transformers)."""


class EsmBackbone(PackedBackbone):
    """An EsmModel, Esmeray's or transformers', on packed batches, with rotary or (ESM-1b) absolute positions."""

    def __init__(self, model: Any, **settings: Any) -> None:
        super().__init__(model, **settings)
        if model.embeddings.position_embedding_type == "absolute":
            self.longest = int(self.config.max_position_embeddings - _first_position(model.embeddings))
        self._layer: _Layer = _layer
        self._selective_layer: _Layer = _selective_layer

    def compile_layers(self, backend: str = "inductor") -> None:
        # The function is compiled, not each module: one graph serves all layers, which differ in weights only.
        self._layer = torch.compile(_layer, fullgraph=True, backend=backend)
        self._selective_layer = torch.compile(_selective_layer, fullgraph=True, backend=backend)

    def _hidden_states(self, batch: PackedBatch, layers: Set[int]) -> dict[int, Tensor]:
        return self._hidden_states_of([batch], layers)[0]

    def _hidden_states_of(self, batches: Sequence[PackedBatch], layers: Set[int]) -> list[dict[int, Tensor]]:
        checkpointing = self.training and torch.is_grad_enabled() and self.gradient_checkpointing
        run = self._selective_layer if checkpointing == "selective" else self._layer
        hidden = [self._embed(batch) for batch in batches]
        # Once per batch: transformers computes the rotary tables in every layer.
        layouts = [_layout(self.model, hidden_TD, batch) for hidden_TD, batch in zip(hidden, batches, strict=True)]
        kept = {0: hidden.copy()} if 0 in layers else {}
        for number, layer in enumerate(self.model.encoder.layer, start=1):
            # All batches pass a layer before the next one, which may be streamed from disk.
            for index, layout in enumerate(layouts):
                if checkpointing is True:
                    hidden[index] = checkpoint(run, layer, hidden[index], layout, use_reentrant=False)
                else:
                    hidden[index] = run(layer, hidden[index], layout)
            if number in layers:  # only requested layers stay in memory
                kept[number] = hidden.copy()
        # The last layer's state includes the final norm, as in transformers' list.
        norm = self.model.encoder.emb_layer_norm_after
        if norm is not None and self.num_layers in layers and self.has_final_norm:
            kept[self.num_layers] = [norm(hidden_TD) for hidden_TD in hidden]
        return [dict(zip(kept, states, strict=True)) for states in zip(*kept.values(), strict=True)]

    def contacts(self, tokens_L: Tensor) -> Tensor:
        """Return (residues, residues) fp32 contact probabilities (Rao et al. 2021) of one sequence.

        ``tokens_L``: ids with <cls> and <eos>. Uses transformers' attention, whose weights the contact head needs.
        """
        # Imported here, since importing transformers' models takes seconds.
        from esmeray.model.backbones.huggingface_loading import transformers_network

        network: Any = transformers_network(self.model).eval()
        network.set_attn_implementation("eager")
        return network.predict_contacts(tokens_L[None], torch.ones_like(tokens_L)[None])[0].float()

    def _embed(self, batch: PackedBatch) -> Tensor:
        """Return (T, D) embeddings, equal to EsmEmbeddings.forward on each sequence alone."""
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
    """Return the first absolute position: the one after the padding index (fairseq's convention)."""
    return int(embeddings.padding_idx) + 1


def _token_dropout(embeddings_TD: Tensor, batch: PackedBatch, mask_token_id: int) -> Tensor:
    """Zero <mask> embeddings and rescale the others by each sequence's share of <mask>.

    The order of operations is the same as in EsmEmbeddings for one sequence: results are bit-identical.
    """
    is_mask_T = batch.tokens == mask_token_id
    # Counts are differences of a running sum: no loop over sequences, no synchronisation.
    masks_before = nn.functional.pad(is_mask_T.cumsum(0), (1, 0))
    bounds = batch.cu_seqlens.long()
    kept_N = 1 - masks_before[bounds].diff().float() / bounds.diff()
    kept_T1 = kept_N[batch.segment_ids()].unsqueeze(-1)
    visible_TD = embeddings_TD.masked_fill(is_mask_T.unsqueeze(-1), 0.0)
    return (visible_TD * (1 - _TRAINED_MASK_SHARE) / kept_T1).to(embeddings_TD.dtype)


def _keeping_products() -> tuple[Any, Any]:
    # Imported here, as in esmeray.model.attention.packed: it registers the operator, and takes a second.
    import torch.nn.attention.varlen

    # The most expensive outputs are kept; norms, rotation and GELU are cheap to recompute and large.
    kept = [
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_mm.default,
        torch.ops.torch_attn._varlen_attn.default,
        torch.ops.esmeray.cpu_attention.default,
    ]
    return create_selective_checkpoint_contexts(kept)  # type: ignore[arg-type]


class _Layout(NamedTuple):
    """Properties of a batch that every layer needs, computed once.

    ``by_kernel``: attention and rotation run in the CPU kernel. ``rotary``: tables by position for the kernel,
    otherwise (T, 1, d/2) rows by token.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    by_kernel: bool
    rotary: RotaryTables | None


_Layer: TypeAlias = Callable[[Any, Tensor, _Layout], Tensor]


def rotary_tables(frequencies: Tensor, num_positions: int) -> RotaryTables:
    """Return rotary tables of the first P positions. ``frequencies``: (d/2,) fp32, radians per position.

    RoFormer (Su et al. 2021, equation 34); ESM-2 rotates channels i and i + d/2 of each head of queries and keys.
    """
    # Always fp32: in bf16, neighbouring positions beyond 256 would be equal.
    positions_P = torch.arange(num_positions, device=frequencies.device, dtype=torch.float32)
    angles = torch.outer(positions_P, frequencies.float())
    return RotaryTables(angles.cos(), angles.sin())


def rotate(x_THd: Tensor, cosines_T1d: Tensor, sines_T1d: Tensor) -> Tensor:
    """Rotate every head in fp32 by the tables' rows (T, 1, d/2) for each token; returns the input's dtype."""
    first, second = x_THd.float().chunk(2, dim=-1)
    rotated = (first * cosines_T1d - second * sines_T1d, second * cosines_T1d + first * sines_T1d)
    return torch.cat(rotated, dim=-1).to(x_THd.dtype)


def _layout(model: Any, hidden_TD: Tensor, batch: PackedBatch) -> _Layout:
    attention = model.encoder.layer[0].attention.self
    heads_THd = hidden_TD.unflatten(-1, (attention.num_attention_heads, attention.attention_head_size))
    by_kernel = not (attention.training and attention.dropout > 0) and kernel_takes(heads_THd, heads_THd)
    rotary = None
    if model.rotary_embeddings is not None:
        rotary = rotary_tables(model.rotary_embeddings.inv_freq, batch.max_seqlen)
        if not by_kernel:  # the kernel looks up the rows itself
            rotary = RotaryTables(*(table[batch.positions].unsqueeze(1) for table in rotary))
    return _Layout(batch.cu_seqlens, batch.max_seqlen, by_kernel, rotary)


def _layer(layer: Any, hidden_TD: Tensor, layout: _Layout) -> Tensor:
    """Run one EsmLayer: pre-norm attention and feed-forward, each with a residual connection."""
    attention = layer.attention
    attended_TD = _self_attention(attention.self, attention.LayerNorm(hidden_TD), layout)
    hidden_TD = hidden_TD + attention.output.dropout(attention.output.dense(attended_TD))
    # torch's GELU is one pass; transformers' EsmIntermediate takes five.
    inner = functional.gelu(layer.intermediate.dense(layer.LayerNorm(hidden_TD)))
    return hidden_TD + layer.output.dropout(layer.output.dense(inner))


def _selective_layer(layer: Any, hidden_TD: Tensor, layout: _Layout) -> Tensor:
    """Run a layer; the backward pass recomputes norms, rotation and GELU."""
    return checkpoint(_layer, layer, hidden_TD, layout, use_reentrant=False, context_fn=_keeping_products)


def _self_attention(attention: Any, hidden_TD: Tensor, layout: _Layout) -> Tensor:
    """Return (T, D), as EsmSelfAttention on each sequence alone; scaling before the rotation is equivalent."""
    heads, head = attention.num_attention_heads, attention.attention_head_size
    query, key, value = (
        projection(hidden_TD).unflatten(-1, (heads, head))
        for projection in (attention.query, attention.key, attention.value)
    )
    scaling = head**-0.5
    # The kernel rotates while it copies a head into cache, which saves a pass over memory.
    if layout.by_kernel:
        return cpu_attention(query, key, value, layout.cu_seqlens, scaling, layout.rotary).flatten(1)
    if layout.rotary is not None:
        query, key = rotate(query, *layout.rotary), rotate(key, *layout.rotary)
    return attend(
        query,
        key,
        value,
        layout.cu_seqlens,
        layout.max_seqlen,
        scaling=scaling,
        dropout=attention.dropout if attention.training else 0.0,
    ).flatten(1)
