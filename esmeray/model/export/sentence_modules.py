"""Files that make sentence-transformers pool an export as Esmeray does: the mean over residues, without special tokens.

    modules.json                the network, weights of its tokens, and the pooling, one after the other
    sentence_bert_config.json   the length of texts that the network takes
    1_WordWeights/config.json   0 for the tokens around each sequence, 1 for any other
    2_Pooling/config.json       the mean by these weights

sentence-transformers' pooling alone would count the tokens around a sequence.
"""

import json
from pathlib import Path

from esmeray.dataset.tokens.base import SequenceTokenizer

_MODULES = {"Transformer": "", "WordWeights": "1_WordWeights", "Pooling": "2_Pooling"}
_ANY_LENGTH = 1_000_000
"""In place of the length at which the tokenizer would cut in silence, though the network takes more."""


def write_sentence_modules(folder: Path, tokenizer: SequenceTokenizer, channels: int, longest: int | None) -> None:
    """Write the files; ``channels`` of a vector, ``longest`` text in tokens, special ones included, None for any."""
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
