"""A tokenizer learnt from the training texts: byte-pair encoding of bytes, so that nothing is ever unknown.

In: texts. Out: a tokenizer that saves itself as a Hugging Face folder. Its pipeline is Qwen2's to the letter, since
``AutoTokenizer`` puts Qwen2's own in its place where it finds these files beside a Qwen2.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from dataset.tokens.huggingface import HuggingFaceTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PADDING_TOKEN, END_TOKEN = "<|pad|>", "<|endoftext|>"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern at which Qwen2 splits a text into words."""

_NUM_BYTES = 256
_SMALLEST_COUNT = 2
"""Pairs that occur once are not learnt: they would be a record's own words, and no help with others."""


def train_bpe(texts: Iterable[str], vocabulary_size: int) -> HuggingFaceTokenizer:
    """Byte-pair encoding of bytes (Radford et al. 2019), learnt from these texts: nothing is ever unknown.

    Text is split into words as Qwen2 does, and normalised to NFC; no character is lost. What looks like a special token
    in a text is taken as text. The same texts give the same tokens. ``vocabulary_size`` counts the 256 bytes, the
    padding and the end token; few texts give fewer. Raises ConfigError where it can't hold all bytes.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers.processors import TemplateProcessing

    special = [PADDING_TOKEN, END_TOKEN]
    if vocabulary_size < _NUM_BYTES + len(special):
        raise ConfigError(
            f"model.tokenizer.vocabulary_size {vocabulary_size} can't hold the {_NUM_BYTES} bytes and {len(special)} "
            f"special tokens; set it to at least {_NUM_BYTES + len(special)}"
        )
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_WORDS), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=special,
        min_frequency=_SMALLEST_COUNT,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        continuing_subword_prefix="",  # as Qwen2 has it: None would be another fingerprint for the same tokens
        end_of_word_suffix="",
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = TemplateProcessing(
        single=f"$A {END_TOKEN}", pair=None, special_tokens=[(END_TOKEN, special.index(END_TOKEN))]
    )
    tokenizer: Any = _Learnt(backend)
    return HuggingFaceTokenizer(tokenizer, spaced=False)


class _Learnt:
    """A learnt pipeline with what :class:`HuggingFaceTokenizer` asks of a tokenizer of transformers.

    transformers, which takes a second to import, is needed to save it alone.
    """

    split_special_tokens = True
    all_special_tokens = (PADDING_TOKEN, END_TOKEN)
    added_tokens_encoder: dict[str, int] = {}  # noqa: RUF012 - none but the special ones

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend
        self.get_vocab = backend.get_vocab
        self.pad_token_id, self.eos_token_id = map(backend.token_to_id, (PADDING_TOKEN, END_TOKEN))

    def save_pretrained(self, folder: Path) -> None:
        """Write it as transformers' Qwen2 tokenizer, which AutoTokenizer makes of these files."""
        from transformers import Qwen2Tokenizer

        learnt = json.loads(self.backend_tokenizer.to_str())["model"]
        names = {"unk_token": END_TOKEN, "eos_token": END_TOKEN, "pad_token": PADDING_TOKEN}
        merges: Any = [tuple(merge) for merge in learnt["merges"]]
        tokenizer: Any = Qwen2Tokenizer(vocab=learnt["vocab"], merges=merges, split_special_tokens=True, **names)
        tokenizer.backend_tokenizer.post_processor = self.backend_tokenizer.post_processor
        tokenizer.save_pretrained(folder)
