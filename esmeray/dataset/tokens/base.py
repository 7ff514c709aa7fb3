"""Convert texts to token ids for all backbones: ESM alphabet, Hugging Face's fast tokenizers, or one trained here.

Special tokens before and after a sequence (<cls>, </s> ...) are kept separately, so that cropped sequences get them.

Shape legend: N texts, T tokens of all texts.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import ConfigError
from esmeray.common.publishing import exclusive, published
from esmeray.dataset.fasta.alphabet import ALL_KNOWN, AMINO_ACIDS
from esmeray.dataset.section import TokenizerSection
from esmeray.dataset.tokens import esm
from esmeray.dataset.tokens.huggingface import (
    SOURCE_KEY,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    TOKENIZER_PATTERNS,
    HuggingFaceTokenizer,
    end_to_end,
    open_folder,
)
from esmeray.dataset.tokens.model_folder import CONFIG_FILE, local_folder, model_folder, read_settings

_LONG_PROTEIN = 50 * AMINO_ACIDS
"""Test protein for tokenizers: WordPiece treats words of more than a hundred letters as unknown."""

PADDING_TOKEN, END_TOKEN = "<|pad|>", "<|endoftext|>"


class EsmSequenceTokenizer:
    """The ESM alphabet, by the tables of :mod:`esmeray.dataset.tokens.esm`; for attributes see HuggingFaceTokenizer."""

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
        """Return the ids of N texts, concatenated, (T,), and the number per text, (N,): one per residue."""
        joined = "".join(texts)
        # All texts at once by table lookup. If any character is missing from it, all texts take the slower way.
        if joined.isascii():
            ids_T = esm.RESIDUE_TABLE[np.frombuffer(joined.encode("ascii"), dtype=np.uint8)]
            if not (ids_T == esm.UNK).any():
                return ids_T.astype(np.int32), esm.sequence_lengths(texts)
        return end_to_end([esm.encode(text)[1:-1] for text in texts])

    def save(self, folder: Path, **settings: int) -> None:
        """Write vocab.txt and the configuration of an ``EsmTokenizer`` with these settings."""
        from transformers import EsmTokenizer

        vocabulary = folder / "vocab.txt"
        vocabulary.write_text("\n".join(esm.VOCABULARY), encoding="utf-8")
        EsmTokenizer(str(vocabulary), **settings).save_pretrained(folder)


SequenceTokenizer = EsmSequenceTokenizer | HuggingFaceTokenizer


def load_tokenizer(
    section: TokenizerSection, backbone_source: str, training_texts: Callable[[], Iterable[str]], folder: Path
) -> SequenceTokenizer:
    """Return the tokenizer of a model.

    A trained backbone has its own. With random weights it is the ESM alphabet for proteins, and a trained one for text.

    Args:
        backbone_source: ``model.backbone.source``.
        training_texts: returns the texts to train on; called only if no trained tokenizer exists.
        folder: folder of the trained tokenizer, specific to a set of training texts and the size of the vocabulary.

    Raises ConfigError if there is no such tokenizer or it does not match the content; ResourceError if the hub is
    unreachable or the folder is not writable.
    """
    is_text = section.content == "text"
    tokenizer: SequenceTokenizer = EsmSequenceTokenizer()
    if local_folder(backbone_source, SOURCE_KEY) is not None or "/" in backbone_source:
        tokenizer = open_tokenizer(backbone_source, is_text)
    elif is_text and not backbone_source.startswith("esm"):
        tokenizer = _trained(section.vocabulary_size, training_texts, folder)
    if not is_text:
        check_protein(tokenizer, backbone_source)
    elif isinstance(tokenizer, EsmSequenceTokenizer):
        raise ConfigError(
            "model.tokenizer.content text does not work with the ESM alphabet, which has only residues; choose "
            "a text backbone (e.g. qwen2 or bert with random weights), or set content protein"
        )
    return tokenizer


def open_tokenizer(folder_or_hub: str | Path, is_text: bool = False) -> SequenceTokenizer:
    """Open the tokenizer of a local folder or a hub name: the ESM alphabet or a fast tokenizer. Runs no remote code.

    Blanks are put between residues if the vocabulary consists of single letters and knows residues only as separate
    words, or if the tokenizer was saved that way; never if it ``is_text``. Raises ConfigError if there is no such
    tokenizer, ResourceError if the hub is unreachable.
    """
    folder = model_folder(str(folder_or_hub), TOKENIZER_PATTERNS, SOURCE_KEY, TOKENIZER_FILE)
    return EsmSequenceTokenizer() if _is_esm(folder) else open_folder(folder, is_text)


def check_protein(tokenizer: SequenceTokenizer, source: str) -> None:
    """Raise ConfigError if a tokenizer does not know the 20 amino acids; the message lists the missing ones."""
    if isinstance(tokenizer, EsmSequenceTokenizer) or tokenizer.one_token_per_residue or tokenizer.knows(_LONG_PROTEIN):
        return
    unknown = [letter for letter in AMINO_ACIDS if not tokenizer.knows(letter)]
    raise ConfigError(
        f"{SOURCE_KEY}: the tokenizer of {source} does not know "
        f"{', '.join(unknown) or 'words as long as a protein'}; it may not be a protein tokenizer, or may need "
        "do_lower_case false in its tokenizer_config.json"
    )


def _trained(vocabulary_size: int, training_texts: Callable[[], Iterable[str]], folder: Path) -> HuggingFaceTokenizer:
    folder = folder.absolute()
    with exclusive(folder):
        if not folder.exists():
            with published(folder) as building:
                train_bpe(training_texts(), vocabulary_size).save(building)
    return open_folder(folder, is_text=True)


def train_bpe(texts: Iterable[str], vocabulary_size: int) -> HuggingFaceTokenizer:
    """Train a byte-level BPE tokenizer (Radford et al. 2019) on texts. All bytes are in its vocabulary.

    Text is split into words and normalized (NFC) by the pipeline of Qwen2, because ``AutoTokenizer`` uses that pipeline
    for every Qwen2 model. Special tokens that occur in a text are treated as text. Equal texts give an equal tokenizer.

    ``vocabulary_size`` includes the 256 bytes, the padding and the end token; few texts give fewer tokens.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import Qwen2Tokenizer

    special = {PADDING_TOKEN: 0, END_TOKEN: 1}
    names = {"unk_token": END_TOKEN, "eos_token": END_TOKEN, "pad_token": PADDING_TOKEN}
    empty: Any = Qwen2Tokenizer(vocab=special, merges=[], split_special_tokens=True, **names)
    # Pairs that occur once are words of a single record and don't help with others.
    learnt = empty.train_new_from_iterator(texts, vocabulary_size, min_frequency=2, show_progress=False)
    learnt.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {END_TOKEN}", pair=None, special_tokens=[(END_TOKEN, special[END_TOKEN])]
    )
    return HuggingFaceTokenizer(learnt, spaced=False)


def _is_esm(folder: Path) -> bool:
    """Return whether the folder's tokenizer is the ESM alphabet; raises ConfigError for one with other ids."""
    named = folder / TOKENIZER_CONFIG_FILE
    model = folder / CONFIG_FILE
    # If no class is named, use the model type, as transformers does.
    kind = read_settings(named, SOURCE_KEY).get("tokenizer_class") if named.is_file() else None
    if kind is None and model.is_file() and read_settings(model, SOURCE_KEY).get("model_type") == "esm":
        kind = "EsmTokenizer"
    if kind != "EsmTokenizer":
        return False
    vocabulary = folder / "vocab.txt"
    # An EsmTokenizer with another vocabulary would silently get wrong ids from the ESM table.
    if vocabulary.is_file() and tuple(vocabulary.read_text(encoding="utf-8").split()) != esm.VOCABULARY:
        raise ConfigError(f"{SOURCE_KEY}: {vocabulary} is not ESM-2's vocabulary of {len(esm.VOCABULARY)} tokens")
    return True
