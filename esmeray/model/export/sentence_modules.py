"""Files that make sentence-transformers pool an export as Esmeray does: mean over residues, without special tokens.

    modules.json                sequence of modules: network, token weights, pooling
    sentence_bert_config.json   maximum length of the network's input
    1_WordWeights/config.json   weight 0 for special tokens around a sequence, 1 for other tokens
    2_Pooling/config.json       mean with these weights

Without the weights, sentence-transformers would include special tokens in the mean.
"""

import json
from pathlib import Path

from esmeray.dataset.tokens.base import SequenceTokenizer

_MODULES = {"Transformer": "", "WordWeights": "1_WordWeights", "Pooling": "2_Pooling"}
_ANY_LENGTH = 1_000_000
"""Maximum length for networks without a limit. Without it the tokenizer would silently truncate at its own length."""


def write_sentence_modules(folder: Path, tokenizer: SequenceTokenizer, channels: int, longest: int | None) -> None:
    """Write the files.

    ``channels``: channels of a vector. ``longest``: maximum number of tokens, including special ones; None for any.
    """
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(_MODULES.items())
    ]
    around = {tokenizer.tokens[token]: 0.0 for token in (*tokenizer.prefix, *tokenizer.suffix)}
    contents = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": longest or _ANY_LENGTH, "do_lower_case": False},
        "1_WordWeights/config.json": {
            "vocab": list(tokenizer.tokens),
            "word_weights": around,
            "unknown_word_weight": 1,
        },
        "2_Pooling/config.json": {"word_embedding_dimension": channels, "pooling_mode_mean_tokens": True},
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
