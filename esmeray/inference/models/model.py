"""A model on a device, with the only forward loop of inference: packed batches of texts to rows of its outputs.

Shape legend: T tokens of a batch, N sequences, n sequences of a batch, R residues of all of them, L residues of one
sequence, C channels.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.profiler import record_function

from esmeray.common.errors import ConfigError, DataError, did_you_mean
from esmeray.dataset.batches.plan import longest_first
from esmeray.dataset.batches.preparation import FixedCrop, head_length
from esmeray.dataset.embeddings.manifest import space_of
from esmeray.dataset.sequence_list import checked_text, clean_list
from esmeray.dataset.tokens.base import EsmSequenceTokenizer
from esmeray.dataset.tokens.esm import sequence_lengths, tokenize_pieces
from esmeray.inference.models.kinds import Limit, ModelFacts, Output, kind_of, output_names
from esmeray.inference.models.packing import ModelInput, Tokenized, input_of_pieces, model_input
from esmeray.model.backbones.base import PackedBackbone
from esmeray.model.backbones.fingerprint import architecture, features_fingerprint, weights_fingerprint
from esmeray.model.backbones.lora import merge
from esmeray.model.backbones.streaming import StreamedLayers
from esmeray.model.cost.flops import forward_flops
from esmeray.model.device import DTYPES, refuse_forked
from esmeray.model.forward_loop import ForwardLoop, Indices
from esmeray.model.optimization import arithmetic, fix_rows, optimize_for_inference
from esmeray.tasks.opening import Opened
from esmeray.train_config.section import ComputeSection, Precision

STREAMED_TOKENS = 16_384
"""Tokens that pass through a streamed layer before the next layer is read.

Two cores with AMX then read 105 MB/s, and the hidden states of a 15B model take 170 MB in bf16.
"""

Features: TypeAlias = dict[Any, Tensor]
"""Features (T, C) by feature function and layer; None is the last layer."""


class Model:
    """A model for inference, created by :func:`esmeray.inference.models.opening.open_model`.

    Args:
        opened: backbone, tokenizer and heads; the heads are keyed by task.
        limit: maximum length and crop of texts. A model trained to predict has its training limit; others have the
            backbone's.
        equal_bytes: on the CPU, make a vector independent of its batch.
        content: "protein" sequences are cleaned as in a store; "text" is read unchanged.
    """

    def __init__(
        self,
        opened: Opened,
        *,
        name: str,
        task: str | None,
        precision: Precision,
        device: torch.device,
        random_weights: bool,
        limit: Limit | None = None,
        equal_bytes: bool = True,
        content: Literal["protein", "text"] = "protein",
    ) -> None:
        self.device, self.tokenizer, self.heads = device, opened.tokenizer, opened.heads
        self.content: Literal["protein", "text"] = content
        backbone, dtype = opened.backbone, DTYPES[precision]
        # Merged before the fingerprint, so that an adapter and the merged weights count as one model and share a cache.
        merge(backbone)
        head_modules = [_beside_backbone(head) for head in opened.heads.values()]
        # Fingerprinted before the cast, because the identity refers to the trained weights in any precision.
        modules = zip(("", *opened.heads), (backbone, *head_modules), strict=True)
        self._weights = {part: weights_fingerprint(module, f"model {name}") for part, module in modules}
        self._architecture = architecture(backbone)
        special = sum(self.around)
        per_token, per_pair = forward_flops(backbone)
        self.facts: ModelFacts = ModelFacts(
            name=name,
            task=task,
            fingerprint=self._fingerprint(opened.heads),
            num_layers=backbone.num_layers,
            hidden_size=backbone.hidden_size,
            longest=None if backbone.longest is None else backbone.longest - special,
            special_tokens=special,
            flops_per_token=per_token,
            attention_flops=per_pair,
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            precision=precision,
            random_weights=random_weights,
            arithmetic=arithmetic(device, equal_bytes and not backbone.pads),
            streamed=isinstance(backbone.layers, StreamedLayers),
            # Batches in the ESM alphabet: their tokenizer knows all letters, so the backbone's own vocabulary decides.
            unknown=self.tokenizer.unknown_letters if backbone.residue_ids is None else backbone.unknown_letters,
        )
        self.limit = limited(limit or Limit(None), self.facts.longest)
        backbone.to(device)
        # Moved first, because weights laid out for oneDNN (CPU, bf16) can't be moved.
        self.backbone: PackedBackbone = optimize_for_inference(backbone, dtype, fixed_rows=equal_bytes)
        for head in head_modules:
            head.requires_grad_(False).eval().to(device)
            # Buffers keep their precision: they hold scales of features and numbers.
            for parameter in head.parameters():
                parameter.data = parameter.data.to(dtype)
            if equal_bytes:
                fix_rows(head)

    @property
    def around(self) -> tuple[int, int]:
        """Special tokens before and after each sequence."""
        return len(self.tokenizer.prefix), len(self.tokenizer.suffix)

    def outputs(self, kinds: Collection[str] | None = None, layers: Sequence[int] = (-1,)) -> tuple[Output, ...]:
        """Return the outputs of these kinds, by default all that the model has.

        Kinds that read a layer have one output per layer.

        Raises ConfigError if the model lacks an output or layer.
        """
        last = self.facts.num_layers
        wrong = [layer for layer in layers if layer not in range(-last - 1, last + 1)]
        if wrong:
            raise ConfigError(f"layers {wrong[0]}: the model has {last} layers (0 is the embedding layer)")
        known = {name: channels for name in output_names() if (channels := kind_of(name).channels_of(self)) is not None}
        outputs = []
        for name in dict.fromkeys(known if kinds is None else kinds):
            if name not in known:
                reason = " while its layers are streamed or 8-bit" if self.facts.streamed else ""
                reason += did_you_mean(name, known)
                raise ConfigError(
                    f"outputs {name}: not available for this model{reason}; available: {', '.join(known)}"
                )
            kind = kind_of(name)
            per = kind.per(self) if callable(kind.per) else kind.per
            if kind.reads != "layer":  # independent of layers: listed once
                outputs.append(Output(name, name, None, known[name], per, kind.description, kind.masked))
                continue
            # -1 and the last layer's number are the same output, which is computed and stored once.
            for layer in dict.fromkeys(layer % (last + 1) for layer in layers):
                # The default has the plain name, so that readers of a file need not know the number of layers.
                full_name = name if list(layers) == [-1] else f"{name}_layer_{layer}"
                text, semicolon, note = kind.description.partition(";")
                outputs.append(
                    Output(full_name, name, layer, known[name], per, f"{text}, layer {layer}{semicolon}{note}")
                )
        return tuple(outputs)

    def space(self, output: Output) -> str:
        """Identity of an output's vector space, equal to the one in the manifest of a job with this output only."""
        head = kind_of(output.kind).head
        return space_of(self._fingerprint([head] if head else []), output.description)

    def _fingerprint(self, heads: Iterable[str]) -> str:
        """Hash of the backbone's and these heads' weights, the architecture and the tokenizer, hex."""
        weights = map(self._weights.__getitem__, ("", *heads))
        identity = json.dumps([*weights, self._architecture, self.tokenizer.fingerprint], sort_keys=True, default=str)
        return hashlib.sha256(identity.encode()).hexdigest()[:32]

    def cache_key(self, output: Output, max_length: int | None, crop: str) -> str:
        """Cache key of an output's rows, shared by training and jobs."""
        # The last layer has one key, whether it was chosen by default, by -1 or by its number.
        name = output.kind if output.layer == self.facts.num_layers else output.name
        # Without a head the key depends on the backbone's weights only, so that models with the same frozen backbone
        # share features. Otherwise it includes the heads' weights: two autoencoders on one backbone have different
        # latents.
        weights = self._weights[""] if kind_of(output.kind).head is None else self.facts.fingerprint
        return features_fingerprint(
            self.backbone, weights, self.tokenizer.fingerprint, max_length, crop, self.facts.precision, name
        )

    @record_function("tokenize")
    def tokenize(self, texts: Sequence[str], max_length: int | None = None, crop: FixedCrop = "start") -> Tokenized:
        """Convert texts to ids once, at most ``max_length`` per text; batches are packed from the resulting pieces."""
        tokens, whole_N = self.tokenizer.encode(texts)
        # Views of one array: only cropped texts are copied.
        pieces = np.split(tokens, np.cumsum(whole_N))[: len(texts)]
        used_N = whole_N if max_length is None else np.minimum(whole_N, max_length)
        for index in np.flatnonzero(used_N < whole_N).tolist():
            used, piece = int(used_N[index]), pieces[index]
            head = head_length(used, crop)
            # Not [-tail:], because a tail of 0 would keep the whole text.
            pieces[index] = np.concatenate([piece[:head], piece[piece.size - (used - head) :]])
        return Tokenized(pieces, whole_N - used_N)

    def token_budget(self, tokens: int | None) -> int:
        """Token budget of a batch: ``tokens``, or the device's default."""
        return ComputeSection.of(tokens=tokens).resolved(self.device.type == "cuda").tokens

    def batches_at_once(self, token_budget: int | None) -> int:
        """Number of batches that pass through the model together: more than one if each pass reads the layers."""
        return max(1, STREAMED_TOKENS // (token_budget or STREAMED_TOKENS)) if self.facts.streamed else 1

    def embed(
        self, sequences: Sequence[str], output: str = "mean", *, layer: int = -1, tokens: int | None = None
    ) -> NDArray | list[NDArray]:
        """Embed sequences, in their order: (N, C) fp32, or a list of (L, C) for residues or (L, L) for pairs.

        Args:
            sequences: list, array or Series of str; residues are cleaned as in commands (upper case, no final '*'),
                with a warning that counts the changes.
            output: mean, max, cls, residues, logits ..., as :meth:`outputs` lists them.
            layer: layer of outputs that depend on one; 0 is the embeddings, -1 the last.
            tokens: token budget of a batch, special tokens included; by default the device's.

        Raises ConfigError for an output or a layer that the model lacks. Raises DataError for an invalid sequence
        (gaps, digits, empty, too long), too many letters that the vocabulary lacks, or a value that is not finite.
        Raises ResourceError if a single sequence is out of memory.

        >>> vectors = model.embed(["MKTAYIAKQR", "MSILVTRPSP"])  # (2, 320)
        >>> [rows.shape for rows in model.embed(["MKTAYIAKQR", "MSILV"], "residues")]
        [(10, 320), (5, 320)]
        """
        (wanted,) = self.outputs([checked_text(output, "output")], [layer])
        cleaned = clean_list(sequences, "sequences", self.content)
        self.facts.unknown.warn(cleaned)
        texts = TokenizedTexts(self.tokenize(cleaned), self)
        for index in np.flatnonzero(texts.lengths > (self.facts.longest or np.inf)).tolist():
            raise DataError(
                f"sequences[{index}]: {texts.lengths[index]:,} tokens, more than the model's maximum of "
                f"{self.facts.longest:,}; crop it"
            )
        arrays: list[Any] = [None] * texts.lengths.size
        for batch in run(self, texts, [wanted], self.token_budget(tokens)):
            for index, length, array in zip(batch.indices, batch.lengths, batch.by_text(wanted), strict=True):
                shapes = {"protein": (-1,), "residue": (length, -1), "pair": (length, length)}
                arrays[index] = array.reshape(shapes[wanted.per])
        # Reshaped, so that an empty list of sequences gives (0, C).
        return np.array(arrays, np.float32).reshape(-1, wanted.channels) if wanted.per == "protein" else arrays

    @record_function("tokenize")
    def input_of(self, sequences: Sequence[bytes | memoryview]) -> ModelInput:
        """Pack residue sequences into one batch on the CPU, in the model's vocabulary."""
        # For ESM's vocabulary a lookup table maps all bytes at once, without texts or lists of ids.
        if isinstance(self.tokenizer, EsmSequenceTokenizer):
            return model_input(
                self.tokenizer, tokenize_pieces(sequences), sequence_lengths(sequences) + self.facts.special_tokens
            )
        return input_of_pieces(
            self.tokenizer, self.tokenize([bytes(text).decode("ascii") for text in sequences]).pieces
        )

    @torch.inference_mode()
    def rows(
        self, inputs: Sequence[ModelInput], outputs: Sequence[Output], token_budget: int | None = None
    ) -> list[dict[str, Tensor]]:
        """Compute the rows of each output for each batch, by name, in the order of its sequences, on the device.

        Shapes: (N, C) fp32 for proteins, (R, C) for residues, (sum of squared lengths, 1) for pairs. ``finite``, ()
        bool, is true if all values are finite. ``token_budget``: of the passes of outputs that run the model
        themselves.
        """
        refuse_forked(self.facts.name)
        batches = [batch.to(self.device)._replace(token_budget=token_budget) for batch in inputs]
        features = self._features(batches, outputs)
        return [self._rows(own, batch, outputs) for own, batch in zip(features, batches, strict=True)]

    @torch.inference_mode()
    def rows_over_windows(
        self, sequence: bytes | memoryview, outputs: Sequence[Output], *, length: int, overlap: int, token_budget: int
    ) -> dict[str, Tensor]:
        """Compute the rows of one long sequence, with features averaged over windows of ``length`` residues.

        Neighbouring windows share ``overlap`` residues; the last two share more. Special tokens get the mean over all
        windows.
        """
        (ids,) = self.tokenize([bytes(sequence).decode("ascii")]).pieces
        # The last window ends with the sequence and overlaps more, because a shorter window would have less context.
        starts = [*range(0, ids.size - length, length - overlap), ids.size - length]
        prefix, suffix = self.around
        width = prefix + length + suffix
        at_once = max(1, token_budget // width)
        chunks = [starts[first : first + at_once] for first in range(0, len(starts), at_once)]
        windows = []
        for chunk in chunks:
            pieces = [ids[start : start + length] for start in chunk]
            windows.append(input_of_pieces(self.tokenizer, pieces).to(self.device))
        sums: Features = {}
        for chunk, features in zip(chunks, self._in_passes(windows, outputs, token_budget), strict=True):
            for key, features_TC in features.items():
                # Summed in fp32: special tokens of a long sequence sum hundreds of windows.
                counted_TC = nn.functional.pad(features_TC.float(), (0, 1), value=1.0)  # the last column counts windows
                if key not in sums:
                    sums[key] = counted_TC.new_zeros(prefix + ids.size + suffix, counted_TC.shape[1])
                total_TC = sums[key]
                for row_WC, start in zip(counted_TC.unflatten(0, (-1, width)), chunk, strict=True):
                    total_TC[:prefix] += row_WC[:prefix]
                    total_TC[prefix + start : prefix + start + length] += row_WC[prefix : prefix + length]
                    total_TC[prefix + ids.size :] += row_WC[prefix + length :]
        # Averaged before the outputs are computed, so that e.g. max is taken over the sequence's averaged features.
        means = {key: total_TC[:, :-1] / total_TC[:, -1:] for key, total_TC in sums.items()}
        return self._rows(means, input_of_pieces(self.tokenizer, [ids]).to(self.device), outputs)

    def _in_passes(
        self, inputs: Sequence[ModelInput], outputs: Sequence[Output], token_budget: int
    ) -> Iterator[Features]:
        at_once = self.batches_at_once(token_budget)
        for first in range(0, len(inputs), at_once):
            yield from self._features(inputs[first : first + at_once], outputs)

    def _features(self, inputs: Sequence[ModelInput], outputs: Sequence[Output]) -> list[Features]:
        kinds = [(kind_of(output.kind), output.layer) for output in outputs]
        keys = dict.fromkeys((kind.features, layer) for kind, layer in kinds if kind.reads != "tokens")
        layers = {key: self.facts.num_layers if key[1] is None else key[1] for key in keys}
        if not keys:
            return [{} for _ in inputs]
        # One pass serves all outputs. No pass is needed for outputs that read tokens, because these run the model
        # themselves.
        states = self.backbone.hidden_states_of([own.batch for own in inputs], sorted(set(layers.values())))

        def features_of(own: dict[int, Tensor]) -> Features:
            return {key: key[0](self, own[layer]) for key, layer in layers.items()}

        return [features_of(own) for own in states]

    @record_function("pooling")
    def _rows(self, features: Features, inputs: ModelInput, outputs: Sequence[Output]) -> dict[str, Tensor]:
        rows: dict[str, Tensor] = {}
        for output in outputs:
            kind = kind_of(output.kind)
            read = inputs.batch.tokens if kind.reads == "tokens" else features[kind.features, output.layer]
            rows[output.name] = kind.rows(self, read, inputs)
        # One flag on the device. Reading the values here would be a CPU-GPU sync point.
        return {**rows, "finite": torch.stack([tensor.isfinite().all() for tensor in rows.values()]).all()}


def _beside_backbone(head: nn.Module) -> nn.Module:
    """Modules of the head without the backbone, which a task's model also holds."""
    if "backbone" not in dict(head.named_children()):
        return head
    return nn.ModuleList(child for name, child in head.named_children() if name != "backbone")


def limited(limit: Limit, longest: int | None) -> Limit:
    """Cap the limit at the model's maximum, in tokens without special tokens; None for no maximum.

    Training rejects texts longer than the maximum.
    """
    return limit._replace(max_length=min(filter(None, (limit.max_length, longest)), default=None))


class Texts(Protocol):
    """Texts to run a model on; ``lengths`` (N,) are the rows per text in an output of residues."""

    @property
    def lengths(self) -> NDArray[np.int64]: ...

    def batches(self, token_budget: int | None) -> list[Indices]:
        """Indices of the texts per batch; one batch if there is no budget."""
        ...

    def launch(
        self, model: Model, group: Sequence[Indices], outputs: Sequence[Output], token_budget: int | None
    ) -> list[dict[str, Tensor]]:
        """Compute the rows of each batch on the device."""
        ...

    def name(self, index: int) -> str:
        """Name and size of a text, for messages."""
        ...


class TokenizedTexts:
    """Texts tokenized by :meth:`Model.tokenize`."""

    def __init__(self, tokenized: Tokenized, model: Model) -> None:
        self.tokenized, self._special = tokenized, model.facts.special_tokens
        self.lengths = tokenized.lengths

    def batches(self, token_budget: int | None) -> list[Indices]:
        everything = [np.arange(self.lengths.size)]
        return everything if token_budget is None else longest_first(self.lengths + self._special, token_budget)

    def launch(
        self, model: Model, group: Sequence[Indices], outputs: Sequence[Output], token_budget: int | None
    ) -> list[dict[str, Tensor]]:
        return model.rows([self._input(model, indices) for indices in group], outputs, token_budget)

    def _input(self, model: Model, indices: Indices) -> ModelInput:
        return input_of_pieces(model.tokenizer, [self.tokenized.pieces[index] for index in indices.tolist()])

    def name(self, index: int) -> str:
        return f"sequence {index + 1} of {self.lengths[index] + self._special:,} tokens"


class BatchRows(NamedTuple):
    """Rows of the texts of a batch.

    Attributes:
        indices: (n,) indices of the texts.
        lengths: (n,) residues per text.
        arrays: (rows, C) by output name, text after text.
        splits: number of batches that were halved so far because they were out of memory.
    """

    indices: Indices
    lengths: NDArray[np.int64]
    arrays: Mapping[str, NDArray]
    splits: int

    def by_text(self, output: Output) -> list[NDArray]:
        sizes = {"protein": np.ones_like(self.lengths), "residue": self.lengths, "pair": self.lengths**2}[output.per]
        return np.split(self.arrays[output.name], np.cumsum(sizes)[:-1])


def run(
    model: Model,
    texts: Texts | Sequence[str],
    outputs: Sequence[Output],
    token_budget: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Iterator[BatchRows]:
    """Yield the rows of each batch while the device computes the next.

    Args:
        token_budget: token budget of a batch, special tokens included; a longer text has its own batch.
        dtype: dtype of rows per residue or pair.

    Raises DataError if a value is not finite, ResourceError if a single text is out of memory.
    """
    if isinstance(texts, Sequence):
        texts = TokenizedTexts(model.tokenize(texts), model)
    proteins = {output.name for output in outputs if output.per == "protein"} | {"finite"}

    def cast(rows: dict[str, Tensor]) -> dict[str, Tensor]:
        # Cast on the device before the copy, to halve the bytes sent to the host. Rows of proteins are too few to
        # matter.
        return {name: row if name in proteins else row.to(dtype) for name, row in rows.items()}

    def launch(group: Sequence[Indices]) -> list[dict[str, Tensor]]:
        return [cast(rows) for rows in texts.launch(model, group, outputs, token_budget)]

    loop = ForwardLoop(model.device, launch, texts.name, model.batches_at_once(token_budget))
    with record_function("pack"):
        batches = texts.batches(token_budget)
    for indices, tensors in loop.run(batches):
        # Checked here, on the host. Reading the flag earlier would be a sync point before the next batch is launched.
        if not tensors.pop("finite"):
            names = ", ".join(texts.name(index) for index in indices[:3].tolist())
            raise DataError(
                f"the model returns NaN or infinity for the batch of {names} ...; check its weights, or use "
                "another precision"
            )
        yield BatchRows(
            indices, texts.lengths[indices], {name: _array(tensor) for name, tensor in tensors.items()}, loop.splits
        )


def _array(tensor: Tensor) -> NDArray:
    """Convert a tensor to an array; bf16, which NumPy lacks, becomes uint16 with the same bits."""
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
