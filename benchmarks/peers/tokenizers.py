"""transformers' EsmTokenizer without a download: made from the vocabulary that it would fetch."""

from pathlib import Path

from transformers import EsmTokenizer

from dataset.tokens.esm import VOCABULARY

MAX_TOKENS = 1024
"""The model_max_length of facebook/esm2_*: 1022 residues between <cls> and <eos>."""


def esm_tokenizer(folder: Path) -> EsmTokenizer:
    """EsmTokenizer as ``from_pretrained("facebook/esm2_t6_8M_UR50D")`` gives it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(VOCABULARY), encoding="utf-8")
    return EsmTokenizer(str(vocabulary), model_max_length=MAX_TOKENS)
