"""Interface of all backbones: a module from a packed batch to one feature vector per token.

Shape legend: T tokens in the batch, D channels.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Literal, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from esmeray.common.errors import ConfigError
from esmeray.dataset.fasta.alphabet import ALL_KNOWN, UnknownLetters
from esmeray.dataset.packed_batch import PackedBatch

Checkpointing: TypeAlias = bool | Literal["selective"]


class Float32Buffers(nn.Module):
    """Base class that keeps the dtype of a module's own buffers through casts; they still move between devices.

    ``module.bfloat16()``, which training engines call, casts buffers too. Rotary frequencies in bf16 are off by up to
    0.4 %, an error of four radians at position 1000; feature scales have the same relative error.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        # A cast and a move are the same call: apply both, then restore cast buffers from the old values.
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            applied = self._buffers[name]
            if applied is not None and applied.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(applied.device)
        return self


class _NothingDrawn(TorchFunctionMode):
    """Skip random initialisation of tensors.

    Tensors on the meta device have no values, and the initialisers would import torch._dynamo.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func.__name__ in ("normal_", "uniform_", "kaiming_uniform_", "trunc_normal_"):
            return args[0] if args else keywords["tensor"]
        return func(*args, **keywords)


@contextmanager
def empty_weights() -> Iterator[None]:
    """Create modules on the meta device within the block: shapes and dtypes without weights."""
    with torch.device("meta"), _NothingDrawn():
        yield


class PackedBackbone(nn.Module, ABC):
    """Base class of backbones: wraps a network in Hugging Face's layout to run on packed batches.

    Heads of the network that no feature passes through get no gradient and are kept for the export.

    Attributes:
        model: the network, without a language-model head.
        frozen: no gradients, always in evaluation mode.
        gradient_checkpointing: recompute each layer in the backward pass; "selective": all but products and attention.
        residue_ids: (33,) int64, the backbone's id of each token of the ESM alphabet, if batches come in that alphabet;
            None if they come in the backbone's own vocabulary.
        unknown_letters: residues of these batches that the backbone's vocabulary lacks.
        longest: maximum number of tokens of a sequence, special ones included; None for no limit.
        causal: features depend on earlier tokens only, so that only the last token has seen the sequence.
        pads: the network takes padded batches; packing and padding happen in the backbone.
        lora_export: how to export an adapter around its layers; "merged" also without an adapter.
    """

    model: Any
    longest: int | None = None
    causal: bool = False
    pads: ClassVar[bool] = False
    lora_export: Literal["merged", "adapter"] = "merged"
    residue_ids: Tensor | None
    unknown_letters: UnknownLetters = ALL_KNOWN

    def __init__(
        self, model: nn.Module, *, frozen: bool = False, gradient_checkpointing: Checkpointing = False
    ) -> None:
        super().__init__()
        _keep_rotary_float32(model)
        self.model = model
        self.frozen = frozen
        self.gradient_checkpointing = gradient_checkpointing
        self.register_buffer("residue_ids", None, persistent=False)
        # No loss reaches these heads: gradients and optimizer state would waste memory.
        for name in ("contact_head", "pooler"):
            head = getattr(model, name, None)
            if isinstance(head, nn.Module):
                head.requires_grad_(False)
        if frozen:
            self.requires_grad_(False)
            self.eval()

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def has_final_norm(self) -> bool:
        """False for the first layers of a model, whose last layer no norm follows.

        transformers' setting ``tie_last_hidden_states`` records it: the last of its ``hidden_states`` is then without
        the norm, too.
        """
        return getattr(self.config, "tie_last_hidden_states", None) is not False

    def use_final_norm(self) -> Self:
        """Apply the final norm also in a cut model: training adapts to it, and programs that read exports apply it."""
        if not self.has_final_norm:
            self.config.tie_last_hidden_states = None
        return self

    @property
    def layers(self) -> nn.ModuleList:
        return layer_list(self.model, self.num_layers)[1]

    def train(self, mode: bool = True) -> "PackedBackbone":
        return super().train(mode and not self.frozen)  # dropout would change the features in each epoch

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return (T, D) features of every token: the last hidden state, after the final norm, in the weights' dtype.

        Raises ConfigError (a sequence is longer than :attr:`longest`).
        """
        return self.hidden_states_of([batch], [self.num_layers])[0][self.num_layers]

    def hidden_states_of(self, batches: Sequence[PackedBatch], layers: Sequence[int]) -> list[dict[int, Tensor]]:
        """Return (T, D) hidden states of each batch after each of these layers, as in transformers' ``hidden_states``.

        0 is the embeddings, :attr:`num_layers` the features of :meth:`forward`. If layers are streamed, all batches
        pass a layer before the next is read. Raises as :meth:`forward`.
        """
        # Frozen parameters alone do not switch off saved activations.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            return self._hidden_states_of([self._in_own_vocabulary(batch) for batch in batches], frozenset(layers))

    def _in_own_vocabulary(self, batch: PackedBatch) -> PackedBatch:
        if self.longest is not None and batch.max_seqlen > self.longest:
            raise ConfigError(
                f"a sequence of {batch.max_seqlen} tokens exceeds this backbone's {self.longest} positions; set "
                f"data.max_length to at most {self.longest - 2}"
            )
        return batch if self.residue_ids is None else replace(batch, tokens=self.residue_ids[batch.tokens])

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile the layers with torch when the first batch comes: one graph for all layers, in seconds.

        If batches have different shapes (:meth:`esmeray.dataset.packed_batch.PackedBatch.filled`), the graph is
        dynamic.
        """
        for layer in self.layers:
            layer.compile(backend=backend)

    def _hidden_states_of(self, batches: Sequence[PackedBatch], layers: Set[int]) -> list[dict[int, Tensor]]:
        return [self._hidden_states(batch, layers) for batch in batches]

    @abstractmethod
    def _hidden_states(self, batch: PackedBatch, layers: Set[int]) -> dict[int, Tensor]:
        """Return (T, D) by layer, for a batch in the backbone's vocabulary with lengths within :attr:`longest`."""


def decayed_rates(backbone: PackedBackbone, decay: float) -> dict[nn.Parameter, float]:
    """Return each parameter's share of the learning rate, for layer-wise decay (Howard & Ruder 2018).

    The last layer, and the final norm after it, learn at ``decay`` (0 to 1) times the head's rate. Each layer before
    has ``decay`` times the rate of its successor, and the embeddings count as one more layer.
    """
    layers, modules = layer_list(backbone.model, backbone.num_layers)
    height = len(modules) + 1  # parameters before the first layer
    rates = {}
    for name, parameter in backbone.model.named_parameters():  # depth follows the order of parameters
        if name.startswith(f"{layers}."):
            height = len(modules) - int(name.removeprefix(f"{layers}.").partition(".")[0])
        rates[parameter] = decay**height
    return rates


def _keep_rotary_float32(model: nn.Module) -> None:
    """Add :class:`Float32Buffers` as a base class to every rotary module of a Hugging Face model, in place."""
    for module in model.modules():
        if not isinstance(module, Float32Buffers) and any("inv_freq" in name for name in module._buffers):
            # A wrapper would change names in the state and attributes that transformers looks up.
            module.__class__ = _with_float32_buffers(type(module))  # type: ignore[arg-type]


@cache
def _with_float32_buffers(kind: Any) -> Any:
    return type(kind.__name__, (Float32Buffers, kind), {})


def layer_list(model: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of a network's layers."""
    # Found by its length, since the name differs between architectures.
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    name = next(
        (name for name, modules in lists.items() if len(modules) == num_layers),
        max(lists, key=lambda name: len(lists[name])),  # layers that share weights (ALBERT)
    )
    return name, lists[name]
