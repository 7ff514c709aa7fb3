"""Small tokenizers of each kind in Hugging Face folders, with the files of the published ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from esmeray.dataset.tokens.base import EsmSequenceTokenizer, train_bpe

RESIDUES = "LAGVESIKRDTPNQFYMHCWXUBZO"
WORDS = ["the", "card", "did", "not", "arrive", "how", "do", "i", "get", "money", "back", "##s", "##ed", "?", "!"]
TEXTS = [
    "How do I get my money back?",
    "The card did not arrive!",
    "I was charged twice for the same payment, Zürich 12.50 €",
    "  two blanks,\ttabs\nand lines ",
    "日本語のテキスト and مرحبا 👩‍🔬",
    "not",
]
PROTEINS = ["MKTAYIAKQR", "ACDEFGHIKLMNPQRSTVWY", "GG", "MUXBZO", "W"]


SPECIAL = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]


def _write(folder: Path, model_type: str, tokenizer_config: dict[str, Any] | None, **files: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if tokenizer_config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    for name, text in files.items():
        (folder / name.replace("_dot_", ".")).write_text(text, encoding="utf-8")
    return folder


def prot_bert(folder: Path) -> Path:
    """Write a tokenizer like Rostlab/prot_bert: WordPiece with one word per letter."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *RESIDUES]
    named = {"do_lower_case": False, "tokenizer_class": "BertTokenizer"}
    return _write(folder, "bert", named, vocab_dot_txt="\n".join(vocabulary) + "\n")


def bert(folder: Path) -> Path:
    """Write a tokenizer like bert-base-uncased: WordPiece with words and letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = dict.fromkeys([*special, *WORDS, *letters, *(f"##{letter}" for letter in letters)])
    return _write(folder, "bert", {"tokenizer_class": "BertTokenizer"}, vocab_dot_txt="\n".join(vocabulary) + "\n")


def _of_pieces(folder: Path, pieces: list[str]) -> Path:
    from transformers import T5Tokenizer

    folder = _write(folder, "t5", None)
    vocabulary = [*SPECIAL, *((piece, -float(len(piece))) for piece in pieces)]
    T5Tokenizer(vocab=vocabulary, extra_ids=3).save_pretrained(folder)
    return folder


def prot_t5(folder: Path) -> Path:
    """Write a tokenizer like Rostlab/prot_t5_xl_uniref50: sentencepiece with one word per letter."""
    return _of_pieces(folder, [f"▁{letter}" for letter in RESIDUES if letter not in "UZOB"])


def prot_t5_sentencepiece(folder: Path) -> Path:
    """Write the ProtT5 tokenizer as it was published: sentencepiece's own file and no tokenizer.json."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.trainer_spec.model_type = model.trainer_spec.UNIGRAM
    model.trainer_spec.pad_id, model.trainer_spec.eos_id, model.trainer_spec.unk_id = 0, 1, 2
    model.normalizer_spec.name = "identity"
    kinds = model.SentencePiece
    for piece, kind in (("<pad>", kinds.CONTROL), ("</s>", kinds.CONTROL), ("<unk>", kinds.UNKNOWN)):
        model.pieces.add(piece=piece, score=0.0, type=kind)
    for letter in RESIDUES:
        if letter not in "UZOB":
            model.pieces.add(piece=f"▁{letter}", score=-3.0)
    folder = _write(folder, "t5", {"tokenizer_class": "T5Tokenizer", "extra_ids": 3})
    (folder / "spiece.model").write_bytes(model.SerializeToString())
    return folder


def t5(folder: Path) -> Path:
    """Write a tokenizer like t5-small: sentencepiece with words and letters."""
    return _of_pieces(folder, ["▁", *(f"▁{word}" for word in WORDS), *"abcdefghijklmnopqrstuvwxyz", "ing"])


def ankh(folder: Path) -> Path:
    """Write a tokenizer like ElnaggarLab/ankh-base: a T5 with plain letters, without a word-start marker."""
    from tokenizers import Tokenizer, models, processors

    backend = Tokenizer(models.Unigram([*SPECIAL, *((letter, -3.0) for letter in RESIDUES)], unk_id=2))
    backend.add_special_tokens(["<pad>", "</s>", "<unk>"])
    backend.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", 1)])
    names = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "extra_ids": 0}
    return _write(folder, "t5", {"tokenizer_class": "T5Tokenizer", **names}, tokenizer_dot_json=backend.to_str())


def byte_level(folder: Path, model_type: str) -> Path:
    """Write a tokenizer like gpt2, roberta or qwen2: byte-pair encoding in the model's own class."""
    from transformers import GPT2Tokenizer, Qwen2Tokenizer, RobertaTokenizer

    kind: Any = {"gpt2": GPT2Tokenizer, "qwen2": Qwen2Tokenizer, "roberta": RobertaTokenizer}[model_type]
    learnt = json.loads(train_bpe(TEXTS * 3, 300)._backend.to_str())["model"]
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
    vocabulary = [*special, *(token for token in learnt["vocab"] if token not in special)]
    folder = _write(folder, model_type, None)
    merges = [tuple(merge) for merge in learnt["merges"]]
    kind(vocab={token: index for index, token in enumerate(vocabulary)}, merges=merges).save_pretrained(folder)
    return folder


def esm(folder: Path) -> Path:
    """Write the tokenizer of facebook/esm2_t6_8M_UR50D."""
    folder = _write(folder, "esm", None)
    EsmSequenceTokenizer().save(folder)
    return folder


def esmc(folder: Path) -> Path:
    """Write the tokenizer of biohub/ESMC-300M."""
    from transformers import EsmcTokenizer

    folder = _write(folder, "esmc", None)
    EsmcTokenizer().save_pretrained(folder)
    return folder


FOR_PROTEINS: dict[str, Callable[[Path], Path]] = {
    "esm": esm,
    "esmc": esmc,
    "prot_bert": prot_bert,
    "prot_t5": prot_t5,
    "prot_t5_sentencepiece": prot_t5_sentencepiece,
}
FOR_TEXT: dict[str, Callable[[Path], Path]] = {
    "bert": bert,
    "t5": t5,
    "gpt2": lambda folder: byte_level(folder, "gpt2"),
    "qwen2": lambda folder: byte_level(folder, "qwen2"),
    "roberta": lambda folder: byte_level(folder, "roberta"),
}
