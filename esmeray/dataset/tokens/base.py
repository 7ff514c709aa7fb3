"""From texts to token ids, for any backbone: the ESM alphabet, Hugging Face's fast tokenizers, or one trained here.

What stands before and after each sequence (<cls>, </s> ...) is kept apart, so that a cropped sequence gets it too.

Shape legend: N texts, T tokens of all of them.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import ConfigError
from esmeray.common.publishing import exclusive, published
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.section import TokenizerSection
from esmeray.dataset.tokens import esm
from esmeray.dataset.tokens.huggingface import (
    SOURCE_KEY,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    TOKENIZER_PATTERNS,
    HuggingFaceTokenizer,
    Spaced,
    end_to_end,
    open_folder,
)
from esmeray.dataset.tokens.model_folder import CONFIG_FILE, local_folder, model_folder, read_settings
from esmeray.dataset.tokens.unknown import ALL_KNOWN

_ESM = "esm"
"""Result of :func:`_automatic` for the ESM alphabet: no hub name, which has an owner."""

_LONG_PROTEIN = 50 * AMINO_ACIDS
"""WordPiece takes words of more than a hundred letters for unknown, however many of them it knows."""

_TRAINING_FILE = "training.json"
"""The settings of a trained tokenizer, beside it."""

PADDING_TOKEN, END_TOKEN = "<|pad|>", "<|endoftext|>"
_NUM_BYTES = 256


class EsmSequenceTokenizer:
    """The ESM alphabet, by :mod:`esmeray.dataset.tokens.esm`'s tables; attributes as of HuggingFaceTokenizer."""

    fingerprint = hashlib.sha256(" ".join(esm.VOCABULARY).encode()).hexdigest()
    prefix: tuple[int, ...] = (esm.CLS,)
    suffix: tuple[int, ...] = (esm.EOS,)
    pad = esm.PAD
    unknown: int | None = esm.UNK
    mask: int | None = esm.MASK
    unknown_letters = ALL_KNOWN
    tokens = esm.VOCABULARY
    vocabulary_size = len(esm.VOCABULARY)
    one_token_per_residue = True

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids of N texts end to end, (T,), and (N,) how many each has: one a residue."""
        joined = "".join(texts)
        # All texts at once by the table; one character that it lacks and all take the way of any text.
        if joined.isascii():
            ids_T = esm.RESIDUE_TABLE[np.frombuffer(joined.encode("ascii"), dtype=np.uint8)]
            if not (ids_T == esm.UNK).any():
                return ids_T.astype(np.int32), esm.sequence_lengths(texts)
        return end_to_end([esm.encode(text)[1:-1] for text in texts])

    def save(self, folder: Path, **settings: int) -> None:
        """Write vocab.txt and the config of an ``EsmTokenizer`` with these settings."""
        from transformers import EsmTokenizer

        vocabulary = folder / "vocab.txt"
        vocabulary.write_text("\n".join(esm.VOCABULARY), encoding="utf-8")
        EsmTokenizer(str(vocabulary), **settings).save_pretrained(folder)


SequenceTokenizer = EsmSequenceTokenizer | HuggingFaceTokenizer


def load_tokenizer(
    section: TokenizerSection, backbone_source: str, training_texts: Callable[[], Iterable[str]], folder: Path
) -> SequenceTokenizer:
    """The tokenizer that the settings mean.

    Args:
        backbone_source: ``model.backbone.source``, whose tokenizer 'auto' takes.
        training_texts: gives the texts that 'train' learns from; called only if need be.
        folder: where a trained tokenizer is kept and found again, one for each set of training texts.

    Raises ConfigError where there is no such tokenizer, or it does not fit the content; ResourceError where the hub
    can't be reached, or the folder can't be written.
    """
    source, spaced = section.source, section.spaced
    if source == "auto":
        source = _automatic(section, backbone_source)
    # Letters of a text are no residues, however the vocabulary looks.
    if section.content == "text" and spaced == "auto":
        spaced = False
    tokenizer: SequenceTokenizer
    if source == _ESM:
        tokenizer = EsmSequenceTokenizer()
    elif source == "train":
        tokenizer = _trained(section.vocabulary_size, training_texts, folder)
    else:
        tokenizer = open_tokenizer(source, spaced)
    if section.content == "protein":
        check_protein(tokenizer, source)
    elif isinstance(tokenizer, EsmSequenceTokenizer):
        raise ConfigError(
            "model.tokenizer.content text can't be written in the ESM alphabet, which has residues alone; choose a "
            "backbone for text (as qwen2 or bert with random weights), or set content protein"
        )
    return tokenizer


def open_tokenizer(folder_or_hub: str | Path, spaced: Spaced = "auto", key: str = SOURCE_KEY) -> SequenceTokenizer:
    """The tokenizer of a local folder or a hub name, the ESM alphabet or a fast tokenizer; runs no code of theirs.

    ``spaced`` auto puts blanks between residues where the vocabulary consists of single letters and knows the residues
    only as words, or where it was saved so; ``key`` is the setting, for messages. Raises ConfigError where there is no
    such tokenizer, ResourceError where the hub can't be reached.
    """
    folder = model_folder(str(folder_or_hub), TOKENIZER_PATTERNS, key, TOKENIZER_FILE)
    return EsmSequenceTokenizer() if _is_esm(folder, key) else open_folder(folder, spaced, key)


def _automatic(section: TokenizerSection, backbone_source: str) -> str:
    # A model that was trained before has its own tokenizer, in its folder or, by owner/name, on the hub.
    if local_folder(backbone_source, "model.backbone.source") is not None or "/" in backbone_source:
        return backbone_source
    return _ESM if section.content == "protein" or backbone_source.startswith("esm") else "train"


def check_protein(tokenizer: SequenceTokenizer, source: str, key: str = SOURCE_KEY) -> None:
    """Refuse a tokenizer that does not know the 20 amino acids, listing those that it lacks. Raises ConfigError."""
    if isinstance(tokenizer, EsmSequenceTokenizer) or tokenizer.one_token_per_residue or tokenizer.knows(_LONG_PROTEIN):
        return
    unknown = [letter for letter in AMINO_ACIDS if not tokenizer.knows(letter)]
    raise ConfigError(
        f"{key}: the tokenizer of {source} does not know {', '.join(unknown) or 'words as long as a protein'}; it is "
        "not one for proteins, or needs "
        "model.tokenizer.spaced true, or do_lower_case false in its tokenizer_config.json"
    )


def _trained(vocabulary_size: int, training_texts: Callable[[], Iterable[str]], folder: Path) -> HuggingFaceTokenizer:
    folder = folder.absolute()
    # The texts are not among them: the folder is one of a set of texts already.
    facts = {"vocabulary_size": vocabulary_size}
    with exclusive(folder):
        if not (folder / _TRAINING_FILE).is_file() or read_settings(folder / _TRAINING_FILE, SOURCE_KEY) != facts:
            tokenizer = train_bpe(training_texts(), vocabulary_size)
            with published(folder) as building:
                tokenizer.save(building)
                (building / _TRAINING_FILE).write_text(json.dumps(facts) + "\n", encoding="utf-8")
    return open_folder(folder, False, SOURCE_KEY)


def train_bpe(texts: Iterable[str], vocabulary_size: int) -> HuggingFaceTokenizer:
    """Byte-pair encoding of bytes (Radford et al. 2019), learnt from these texts: nothing is ever unknown.

    Text is split into words and normalised (NFC) by the pipeline of Qwen2, which ``AutoTokenizer`` takes instead of any
    other beside a Qwen2. What looks like a special token in a text is taken as text. The same texts give the same
    tokens. ``vocabulary_size`` counts the 256 bytes, the padding and the end token; few texts give fewer. Raises
    ConfigError where it can't hold all bytes.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import Qwen2Tokenizer

    special = {PADDING_TOKEN: 0, END_TOKEN: 1}
    least = _NUM_BYTES + len(special)
    if vocabulary_size < least:
        raise ConfigError(
            f"model.tokenizer.vocabulary_size {vocabulary_size} can't hold the {_NUM_BYTES} bytes and {len(special)} "
            f"special tokens; set it to at least {least}"
        )
    names = {"unk_token": END_TOKEN, "eos_token": END_TOKEN, "pad_token": PADDING_TOKEN}
    empty: Any = Qwen2Tokenizer(vocab=special, merges=[], split_special_tokens=True, **names)
    # Pairs that occur once would be a record's own words, and no help with others.
    learnt = empty.train_new_from_iterator(texts, vocabulary_size, min_frequency=2, show_progress=False)
    learnt.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {END_TOKEN}", pair=None, special_tokens=[(END_TOKEN, special[END_TOKEN])]
    )
    return HuggingFaceTokenizer(learnt, spaced=False)


def _is_esm(folder: Path, key: str) -> bool:
    """Return whether the folder's tokenizer is the ESM alphabet; raises ConfigError for one with other ids."""
    named = folder / TOKENIZER_CONFIG_FILE
    model = folder / CONFIG_FILE
    # Where no class is named, transformers goes by the type of the model, too.
    kind = read_settings(named, key).get("tokenizer_class") if named.is_file() else None
    if kind is None and model.is_file() and read_settings(model, key).get("model_type") == "esm":
        kind = "EsmTokenizer"
    if kind != "EsmTokenizer":
        return False
    vocabulary = folder / "vocab.txt"
    # A class of that name with other tokens would be tokenized by our table, and give wrong ids without a word.
    if vocabulary.is_file() and tuple(vocabulary.read_text(encoding="utf-8").split()) != esm.VOCABULARY:
        raise ConfigError(f"{key}: {vocabulary} is not ESM-2's vocabulary of {len(esm.VOCABULARY)} tokens")
    return True
