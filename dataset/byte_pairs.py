"""A tokenizer learnt from the training texts: byte-pair encoding of bytes, so that nothing is ever unknown.

In: texts. Out: a tokenizer that saves itself as a Hugging Face folder. Its pipeline is Qwen2's to the letter, since
``AutoTokenizer`` puts Qwen2's own in its place where it finds these files beside a Qwen2.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from dataset.huggingface_tokenizer import HuggingFaceTokenizer
from train_config.errors import ConfigError

PADDING_TOKEN, END_TOKEN = "<|pad|>", "<|endoftext|>"
_NUM_BYTES = 256
_SMALLEST_COUNT = 2
"""What was met once is not learnt: it would be a record's own words, and no help with others."""


def train_bpe(texts: Iterable[str], vocabulary_size: int) -> HuggingFaceTokenizer:
    """Byte-pair encoding of bytes (Radford et al. 2019), learnt from these texts: nothing is ever unknown.

    Text is split into words as Qwen2 does, and normalised to NFC, so that letters that look the same are the same; no
    character is lost. What looks like a special token in a text is taken as text. The same texts give the same tokens.

    Args:
        texts: to learn from.
        vocabulary_size: tokens to aim at, with the 256 bytes, the padding and the end token; few texts give fewer.

    Raises:
        ConfigError: the vocabulary can't hold all bytes.
    """
    from tokenizers import trainers
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.processors import TemplateProcessing
    from transformers import Qwen2Tokenizer

    special = [PADDING_TOKEN, END_TOKEN]
    if vocabulary_size < _NUM_BYTES + len(special):
        raise ConfigError(
            f"model.tokenizer.vocabulary_size {vocabulary_size} can't hold the {_NUM_BYTES} bytes and {len(special)} "
            f"special tokens; set it to at least {_NUM_BYTES + len(special)}"
        )
    names = {"unk_token": END_TOKEN, "eos_token": END_TOKEN, "pad_token": PADDING_TOKEN}
    pipeline = Qwen2Tokenizer(vocab={token: index for index, token in enumerate(special)}, merges=[], **names)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=special,
        min_frequency=_SMALLEST_COUNT,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    backend = pipeline.backend_tokenizer
    backend.train_from_iterator(texts, trainer)
    learnt = json.loads(backend.to_str())["model"]
    # Made anew from what was learnt, as AutoTokenizer makes it when it meets these files.
    merges: Any = [tuple(merge) for merge in learnt["merges"]]
    tokenizer: Any = Qwen2Tokenizer(vocab=learnt["vocab"], merges=merges, split_special_tokens=True, **names)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {END_TOKEN}", pair=None, special_tokens=[(END_TOKEN, learnt["vocab"][END_TOKEN])]
    )
    return HuggingFaceTokenizer(tokenizer, spaced=False)
