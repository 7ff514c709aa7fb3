"""A model on a device: texts to packed batches, and batches to the rows of its outputs, in the only forward loop of
inference (:mod:`esmeray.model.forward_loop`).

Shape legend: T tokens of a batch, N sequences, n those of a batch, R residues of all of them, L residues of one,
C channels.
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

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.text import did_you_mean
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
"""Tokens that pass a layer before the next is read: two cores with AMX then read 105 MB/s, and the hidden states of 15B
are 170 MB in bf16."""

Features: TypeAlias = dict[Any, Tensor]
"""(T, C) by the function that made them and the layer that it read, None for the last."""


class Model:
    """See the module; made by :func:`esmeray.inference.models.opening.open_model`.

    ``heads`` has what computes from features, by the name of its task. ``limit`` is that of the texts that it is run
    on: the one that it was trained with, where it was trained to predict; else what it can take. ``equal_bytes``: on
    the CPU a vector does not depend on its batch. ``content``: protein sequences are cleaned as in a store, texts are
    read as they are.
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
        # Before the fingerprint: an adapter and the same weights merged are one model, and share a cache.
        merge(backbone)
        head_modules = [_beside_backbone(head) for head in opened.heads.values()]
        # Before the cast: the identity is of the weights as they were trained, whatever they are computed in.
        modules = zip(("", *opened.heads), (backbone, *head_modules), strict=True)
        self._weights = {part: weights_fingerprint(module, f"model {name}") for part, module in modules}
        self._architecture = architecture(backbone)
        special = sum(self.around)
        per_token, per_pair = forward_flops(backbone)
        self.facts = ModelFacts(
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
            # For batches in the ESM alphabet, whose tokenizer knows all letters, the backbone's own vocabulary decides.
            unknown=self.tokenizer.unknown_letters if backbone.residue_ids is None else backbone.unknown_letters,
        )
        self.limit = limited(limit or Limit(None), self.facts.longest)
        backbone.to(device)
        # Moved first: once weights are laid out for oneDNN (on the CPU, in bf16), they can't be.
        self.backbone: PackedBackbone = optimize_for_inference(backbone, dtype, fixed_rows=equal_bytes)
        for head in head_modules:
            head.requires_grad_(False).eval().to(device)
            # No buffers: scales of features and of numbers need their precision.
            for parameter in head.parameters():
                parameter.data = parameter.data.to(dtype)
            if equal_bytes:
                fix_rows(head)

    @property
    def around(self) -> tuple[int, int]:
        """Special tokens before and after each sequence."""
        return len(self.tokenizer.prefix), len(self.tokenizer.suffix)

    def outputs(self, kinds: Collection[str] | None = None, layers: Sequence[int] = (-1,)) -> tuple[Output, ...]:
        """The outputs of these kinds, by default all that the model has, those of layers once for each layer.

        Raises ConfigError where it has no such output or layer.
        """
        last = self.facts.num_layers
        wrong = [layer for layer in layers if layer not in range(-last - 1, last + 1)]
        if wrong:
            raise ConfigError(f"layers {wrong[0]}: the model has {last} layers; 0 is the embeddings")
        known = {name: channels for name in output_names() if (channels := kind_of(name).channels_of(self)) is not None}
        outputs = []
        for name in dict.fromkeys(known if kinds is None else kinds):
            if name not in known:
                reason = " while its layers are streamed or of 8 bits" if self.facts.streamed else ""
                reason += did_you_mean(name, known)
                raise ConfigError(f"outputs {name}: this model has none{reason}; it has {', '.join(known)}")
            kind = kind_of(name)
            per = kind.per(self) if callable(kind.per) else kind.per
            if kind.reads != "layer":  # of the whole model: once, whatever layers are asked for
                outputs.append(Output(name, name, None, known[name], per, kind.description))
                continue
            # -1 and the last layer's own number are one output, which is computed and stored once.
            for layer in dict.fromkeys(layer % (last + 1) for layer in layers):
                # The default has the plain name: whoever reads a file of means need not know how many layers there are.
                full_name = name if list(layers) == [-1] else f"{name}_layer_{layer}"
                text, semicolon, note = kind.description.partition(";")
                outputs.append(
                    Output(full_name, name, layer, known[name], per, f"{text}, layer {layer}{semicolon}{note}")
                )
        return tuple(outputs)

    def space(self, output: Output) -> str:
        """Identity of what an output's channels mean, as a job of this output alone leaves it in its manifest."""
        head = kind_of(output.kind).head
        return space_of(self._fingerprint([head] if head else []), output.description)

    def _fingerprint(self, heads: Iterable[str]) -> str:
        """Identity of weights, of these heads alone, architecture and tokenizer, hex."""
        weights = map(self._weights.__getitem__, ("", *heads))
        identity = json.dumps([*weights, self._architecture, self.tokenizer.fingerprint], sort_keys=True, default=str)
        return hashlib.sha256(identity.encode()).hexdigest()[:32]

    def cache_key(self, output: Output, max_length: int | None, crop: str) -> str:
        """Identity of an output's rows, by which training and jobs find each other's."""
        # The last layer has one key by whatever name: as a default, by -1 or by its number.
        name = output.kind if output.layer == self.facts.num_layers else output.name
        # By the backbone's weights alone: models on one frozen backbone share its features. What a head computes is of
        # its weights too: two autoencoders on one backbone have other latents.
        weights = self._weights[""] if kind_of(output.kind).head is None else self.facts.fingerprint
        return features_fingerprint(
            self.backbone, weights, self.tokenizer.fingerprint, max_length, crop, self.facts.precision, name
        )

    @record_function("tokenize")
    def tokenize(self, texts: Sequence[str], max_length: int | None = None, crop: FixedCrop = "start") -> Tokenized:
        """Texts as ids, once, at most ``max_length`` of each: batches are then packed from their pieces."""
        tokens, whole_N = self.tokenizer.encode(texts)
        # Views of one array: nothing is copied but what is cropped.
        pieces = np.split(tokens, np.cumsum(whole_N))[: len(texts)]
        used_N = whole_N if max_length is None else np.minimum(whole_N, max_length)
        for index in np.flatnonzero(used_N < whole_N).tolist():
            used, piece = int(used_N[index]), pieces[index]
            head = head_length(used, crop)
            # By the size, not [-tail:]: a tail of 0 would be the whole text.
            pieces[index] = np.concatenate([piece[:head], piece[piece.size - (used - head) :]])
        return Tokenized(pieces, whole_N - used_N)

    def token_budget(self, tokens: int | None) -> int:
        """The budget of a batch: ``tokens``, or what suits the device."""
        return ComputeSection.of(tokens=tokens).resolved(self.device.type == "cuda").tokens

    def batches_at_once(self, token_budget: int | None) -> int:
        """Batches of this budget that pass the model together: more than one where each pass reads the layers."""
        return max(1, STREAMED_TOKENS // (token_budget or STREAMED_TOKENS)) if self.facts.streamed else 1

    def embed(
        self, sequences: Sequence[str], output: str = "mean", *, layer: int = -1, tokens: int | None = None
    ) -> NDArray | list[NDArray]:
        """Vectors of sequences, in their order: (N, C) fp32, or a list of (L, C) of residues or (L, L) of pairs.

        Args:
            sequences: list, array or Series of str; residues are cleaned as commands clean them (upper case, no final
                '*'), with a warning that counts the changes.
            output: mean, max, cls, residues, logits ..., as :meth:`outputs` lists them.
            layer: of those that are of a layer; 0 is the embeddings, -1 the last.
            tokens: budget of a batch, special tokens included; by default what suits the device.

        Raises ConfigError for an output or a layer that the model has not, DataError for a sequence that a command
        would refuse (gaps, digits, none at all, too long), for sequences that the vocabulary does not know and for a
        value that is not finite, ResourceError if a single sequence is out of memory.

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
                f"sequences[{index}]: {texts.lengths[index]:,} tokens, more than the model's {self.facts.longest:,}; "
                "crop it"
            )
        arrays: list[Any] = [None] * texts.lengths.size
        for batch in run(self, texts, [wanted], self.token_budget(tokens)):
            for index, length, array in zip(batch.indices, batch.lengths, batch.by_text(wanted), strict=True):
                shapes = {"protein": (-1,), "residue": (length, -1), "pair": (length, length)}
                arrays[index] = array.reshape(shapes[wanted.per])
        # Reshaped, since no sequences at all are (0, C).
        return np.array(arrays, np.float32).reshape(-1, wanted.channels) if wanted.per == "protein" else arrays

    @record_function("tokenize")
    def input_of(self, sequences: Sequence[bytes | memoryview]) -> ModelInput:
        """Sequences of residues as one batch on the CPU, in the model's own vocabulary."""
        # Of ESM's own vocabulary a table maps all bytes at once, special tokens included: no text, no list of ids.
        if isinstance(self.tokenizer, EsmSequenceTokenizer):
            return model_input(
                self.tokenizer, tokenize_pieces(sequences), sequence_lengths(sequences) + self.facts.special_tokens
            )
        return input_of_pieces(
            self.tokenizer, self.tokenize([bytes(text).decode("ascii") for text in sequences]).pieces
        )

    @torch.inference_mode()
    def rows(self, inputs: Sequence[ModelInput], outputs: Sequence[Output]) -> list[dict[str, Tensor]]:
        """The rows of each output of each batch, by name, in the order of its sequences, on the device.

        (N, C) fp32 for proteins, (R, C) for residues, (sum of squared lengths, 1) for pairs; ``finite`` () bool says
        that all are.
        """
        refuse_forked(self.facts.name)
        batches = [batch.to(self.device) for batch in inputs]
        features = self._features(batches, outputs)
        return [self._rows(own, batch, outputs) for own, batch in zip(features, batches, strict=True)]

    @torch.inference_mode()
    def rows_over_windows(
        self, sequence: bytes | memoryview, outputs: Sequence[Output], *, length: int, overlap: int, token_budget: int
    ) -> dict[str, Tensor]:
        """The same of one sequence, whose features are averaged over the windows of ``length`` that hold a token.

        Neighbouring windows share ``overlap`` residues, the last two more. Special tokens get the mean of the windows'
        own.
        """
        (ids,) = self.tokenize([bytes(sequence).decode("ascii")]).pieces
        # The last window ends with the sequence, and so overlaps more: a shorter one would see less context.
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
                # Summed in fp32: a long sequence adds up hundreds of windows at its special tokens.
                counted_TC = nn.functional.pad(features_TC.float(), (0, 1), value=1.0)  # the last column counts windows
                if key not in sums:
                    sums[key] = counted_TC.new_zeros(prefix + ids.size + suffix, counted_TC.shape[1])
                total_TC = sums[key]
                for row_WC, start in zip(counted_TC.unflatten(0, (-1, width)), chunk, strict=True):
                    total_TC[:prefix] += row_WC[:prefix]
                    total_TC[prefix + start : prefix + start + length] += row_WC[prefix : prefix + length]
                    total_TC[prefix + ids.size :] += row_WC[prefix + length :]
        # Averaged before outputs are made of them: a maximum over residues is that of the whole sequence's means.
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
        # One pass for all outputs, and none where they read tokens: these run the model themselves.
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
        # One flag in place of a look at the values here, which would wait for the device.
        return {**rows, "finite": torch.stack([tensor.isfinite().all() for tensor in rows.values()]).all()}


def _beside_backbone(head: nn.Module) -> nn.Module:
    """The head's own modules: the model of a task holds the backbone as well."""
    if "backbone" not in dict(head.named_children()):
        return head
    return nn.ModuleList(child for name, child in head.named_children() if name != "backbone")


def limited(limit: Limit, longest: int | None) -> Limit:
    """The limit within a model's own, in tokens without special ones; None for any. Training refuses longer texts."""
    return limit._replace(max_length=min(filter(None, (limit.max_length, longest)), default=None))


class Texts(Protocol):
    """Texts that a model is run on; ``lengths`` (N,) are the rows of each in an output of residues."""

    @property
    def lengths(self) -> NDArray[np.int64]: ...

    def batches(self, token_budget: int | None) -> list[Indices]:
        """Indices of the texts of each batch; all in one where there is no budget."""
        ...

    def launch(self, model: Model, group: Sequence[Indices], outputs: Sequence[Output]) -> list[dict[str, Tensor]]:
        """Rows of the texts of each of these batches, on the device."""
        ...

    def name(self, index: int) -> str:
        """Name of a text and its size, for messages."""
        ...


class TokenizedTexts:
    """Texts that :meth:`Model.tokenize` made."""

    def __init__(self, tokenized: Tokenized, model: Model) -> None:
        self.tokenized, self._special = tokenized, model.facts.special_tokens
        self.lengths = tokenized.lengths

    def batches(self, token_budget: int | None) -> list[Indices]:
        everything = [np.arange(self.lengths.size)]
        return everything if token_budget is None else longest_first(self.lengths + self._special, token_budget)

    def launch(self, model: Model, group: Sequence[Indices], outputs: Sequence[Output]) -> list[dict[str, Tensor]]:
        return model.rows([self._input(model, indices) for indices in group], outputs)

    def _input(self, model: Model, indices: Indices) -> ModelInput:
        return input_of_pieces(model.tokenizer, [self.tokenized.pieces[index] for index in indices.tolist()])

    def name(self, index: int) -> str:
        return f"sequence {index + 1} of {self.lengths[index] + self._special:,} tokens"


class BatchRows(NamedTuple):
    """Rows of the texts of a batch: (n,) their indices and lengths in residues; (rows, C) by name of the output, text
    after text; and the batches that were halved for memory until now."""

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
    """The rows of each batch, while the device computes the next.

    ``token_budget`` of a batch, special tokens included; a longer text goes alone. ``dtype``: of what has a row for
    each residue or pair. Raises DataError where a value is not finite, ResourceError where a single text is out of
    memory.
    """
    if isinstance(texts, Sequence):
        texts = TokenizedTexts(model.tokenize(texts), model)
    proteins = {output.name for output in outputs if output.per == "protein"} | {"finite"}

    def cast(rows: dict[str, Tensor]) -> dict[str, Tensor]:
        # On the device, before the copy: half the bytes go to the host. Of proteins there is little to save.
        return {name: row if name in proteins else row.to(dtype) for name, row in rows.items()}

    def launch(group: Sequence[Indices]) -> list[dict[str, Tensor]]:
        return [cast(rows) for rows in texts.launch(model, group, outputs)]

    loop = ForwardLoop(model.device, launch, texts.name, model.batches_at_once(token_budget))
    with record_function("pack"):
        batches = texts.batches(token_budget)
    for indices, tensors in loop.run(batches):
        # Looked at here and not on the device, where it would make the host wait before the next batch is launched.
        if not tensors.pop("finite"):
            names = ", ".join(texts.name(index) for index in indices[:3].tolist())
            raise DataError(
                f"the model gives NaN or infinity in the batch of {names} ...; check its weights, or choose another "
                "precision"
            )
        yield BatchRows(
            indices, texts.lengths[indices], {name: _array(tensor) for name, tensor in tensors.items()}, loop.splits
        )


def _array(tensor: Tensor) -> NDArray:
    """The tensor as an array; bits of bf16, which NumPy lacks, as uint16."""
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
