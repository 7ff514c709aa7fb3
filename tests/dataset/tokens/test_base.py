"""Tokens equal AutoTokenizer's on the same folder, and a trained tokenizer loses nothing."""

import json
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoTokenizer, BertTokenizer

from esmeray.common.errors import ConfigError, DataError, ResourceError
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS, STORE_ALPHABET
from esmeray.dataset.section import TokenizerSection
from esmeray.dataset.tokens.base import (
    EsmSequenceTokenizer,
    HuggingFaceTokenizer,
    SequenceTokenizer,
    load_tokenizer,
    open_tokenizer,
    train_bpe,
)
from tests.dataset.tokenizer_folders import FOR_PROTEINS, FOR_TEXT, PROTEINS, TEXTS, ankh, bert, esm, prot_bert


def whole(tokenizer: SequenceTokenizer, texts: list[str]) -> list[list[int]]:
    """Ids of each text with the special tokens before and after it."""
    ids_T, lengths_N = tokenizer.encode(texts)
    assert ids_T.dtype == np.int32 and lengths_N.dtype == np.int64 and lengths_N.sum() == ids_T.size
    pieces = np.split(ids_T, np.cumsum(lengths_N)[:-1])
    return [[*tokenizer.prefix, *piece.tolist(), *tokenizer.suffix] for piece in pieces]


def load(backbone: object, folder: Path = Path("unused"), **section: Any) -> SequenceTokenizer:
    return load_tokenizer(TokenizerSection(**section), str(backbone), lambda: TEXTS * 5, folder)


@pytest.fixture(scope="module")
def trained() -> HuggingFaceTokenizer:
    return train_bpe(TEXTS * 5, 400)


@pytest.mark.parametrize("kind", [*FOR_PROTEINS, *FOR_TEXT, "ankh"])
def test_tokens_are_those_of_autotokenizer_before_and_after_saving(kind, tmp_path):
    is_text = kind in FOR_TEXT
    folder = {**FOR_PROTEINS, **FOR_TEXT, "ankh": ankh}[kind](tmp_path / "from")
    ours = load(folder, content="text" if is_text else "protein")
    long = "".join(np.random.default_rng(0).choice(list(STORE_ALPHABET), 2000))
    # The model cards of ProtTrans spell a sequence in upper case with blanks, and X for rare residues.
    is_spelled = kind.startswith("prot_")
    no_residues = ["MK*T", "MKé", "M-K", "", *["mkv"] * is_spelled]
    texts = [*TEXTS, "", "[SEP] </s> <|endoftext|>"] if is_text else [*PROTEINS, long, *no_residues]
    spelled = [" ".join(re.sub(r"[UZOB]", "X", text.upper())) if is_spelled else text for text in texts]
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "config.json").write_text((folder / "config.json").read_text())
    ours.save(tmp_path / "to")
    again = open_tokenizer(tmp_path / "to")
    assert again.fingerprint == ours.fingerprint and ours.one_token_per_residue != is_text
    assert whole(again, texts) == whole(ours, texts)
    if kind == "ankh":  # transformers 5 marks the start of a word in every T5, though Ankh's own file has no such mark
        ids = dict(zip("LAGVESIKRDTPNQFYMHCWXUBZO", range(3, 28), strict=True))
        assert whole(ours, ["MKUX"]) == [[ids["M"], ids["K"], ids["U"], ids["X"], 1]] and not ours.spaced
        return
    for theirs in (AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path / "to")):
        assert whole(ours, texts) == [theirs(text)["input_ids"] for text in spelled]
    assert is_text or ours.pad == theirs.pad_token_id


def test_blanks_and_letter_case_are_those_that_know_the_residues(tmp_path):
    folder = prot_bert(tmp_path / "prot_bert")
    assert open_tokenizer(folder).spaced
    lower = '{"do_lower_case": true, "tokenizer_class": "BertTokenizer"}'
    (folder / "tokenizer_config.json").write_text(lower)
    assert open_tokenizer(folder).knows("M"), "a vocabulary of capitals is read without lower-casing"
    words = (folder / "vocab.txt").read_text().split()
    (folder / "vocab.txt").write_text("\n".join(word for word in words if word not in ("K", "W")))
    with pytest.raises(ConfigError, match="does not know K, W; it may not be a protein tokenizer"):
        load(folder)
    folder = bert(tmp_path / "bert")
    with pytest.raises(ConfigError, match="does not know words as long as a protein; it may not be a protein"):
        load(folder)
    # Earlier versions could save any tokenizer with blanks.
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "esmeray_spaced": true}')
    assert open_tokenizer(folder).spaced


def test_random_weights_get_esms_tokenizer_or_a_trained_one(tmp_path):
    assert all(isinstance(load(name), EsmSequenceTokenizer) for name in ("esm2_t6_8M", "bert"))
    ours = load("qwen2", tmp_path / "bpe", content="text", vocabulary_size=300)
    assert isinstance(ours, HuggingFaceTokenizer) and ours.vocabulary_size == 300
    folder = esm(tmp_path / "esm")
    for backbone in ("esm2_t6_8M", str(folder)):
        with pytest.raises(ConfigError, match=r"only residues; choose a text backbone \(e\.g\."):
            load(backbone, content="text")
    (folder / "vocab.txt").write_text("<cls>\n<pad>\n<eos>\n<unk>\nA\n")
    with pytest.raises(ConfigError, match="is not ESM-2's vocabulary of 33 tokens"):
        load(folder)


@settings(deadline=None, max_examples=60)
@given(st.text() | st.sampled_from(["<|endoftext|>", "a<|pad|>b", "\x00\x7f\u200b", "\r\n\t ", "e\u0301"]))
def test_a_trained_tokenizer_loses_no_character_of_any_text(trained, text):
    ids_T, lengths_N = trained.encode([text])
    decoded = trained._backend.decode(ids_T.tolist(), skip_special_tokens=False)
    assert decoded == unicodedata.normalize("NFC", text)
    assert trained.encode(["money"])[1][0] < len("money"), "what is frequent is learnt"
    assert trained.unknown is None and lengths_N.tolist() == [ids_T.size]
    assert not {trained.pad, *trained.suffix} & set(ids_T.tolist()), "special tokens in a text are text"


def test_autotokenizer_opens_a_trained_tokenizer(trained, tmp_path):
    trained.save(tmp_path)
    texts = [*TEXTS, "", "a <|endoftext|> b", "e\u0301"]
    for config in (None, '{"model_type": "llama"}'):
        if config:
            (tmp_path / "config.json").write_text(config)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        assert whole(trained, texts) == [theirs(text)["input_ids"] for text in texts]
        again = open_tokenizer(tmp_path)
        assert again.fingerprint == trained.fingerprint and again.pad == trained.pad


@pytest.mark.slow
def test_the_same_texts_train_the_same_tokenizer_in_any_process(trained):
    program = (
        "import sys; import esmeray.dataset.tokens.token_store; "
        "import esmeray.dataset.batches.loader_process; import esmeray.dataset.batches.preparation; "
        "print({'torch', 'ray', 'deepspeed', 'transformers', 'tokenizers'} & set(sys.modules)); "
        "from tests.dataset.tokenizer_folders import TEXTS; from esmeray.dataset.tokens.base import train_bpe; "
        "print(train_bpe(TEXTS * 5, 400).fingerprint)"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.split() == ["set()", trained.fingerprint]


def test_a_trained_tokenizer_is_found_again(tmp_path):
    def get(texts: Callable[[], Iterable[str]]) -> SequenceTokenizer:
        section = TokenizerSection(content="text", vocabulary_size=280)
        return load_tokenizer(section, "bert", texts, tmp_path / "bpe")

    with pytest.raises(ZeroDivisionError):
        get(lambda: (str(1 // number) for number in (1, 0)))
    assert list(tmp_path.iterdir()) == [], "training that fails leaves none"
    first, again = get(lambda: TEXTS * 5), get(lambda: pytest.fail("trained again"))
    assert first.fingerprint == again.fingerprint
    with pytest.raises(ValidationError, match="greater than or equal to 258"):
        TokenizerSection(vocabulary_size=257)


def test_a_damaged_or_missing_tokenizer_is_refused(tmp_path):
    folder = prot_bert(tmp_path / "damaged")
    (folder / "vocab.txt").unlink()
    with pytest.raises(ConfigError, match="has no tokenizer"):
        load(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    with pytest.raises(ConfigError, match=r"can't be read[^\n]*$"):
        load(folder)


def test_code_named_by_a_tokenizer_is_not_run(tmp_path):
    folder = prot_bert(tmp_path / "evil")
    named = '{"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}'
    (folder / "tokenizer_config.json").write_text(named)
    (folder / "evil.py").write_text(f"import os; os.mkdir({str(tmp_path / 'pwned')!r})\nclass Evil: pass\n")
    (folder / "config.json").write_text('{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}')
    with pytest.raises(ConfigError, match="can't be read"):
        load(folder)
    assert not (tmp_path / "pwned").exists()


def test_an_unknown_source_or_an_unreachable_hub_is_one_clear_line(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="folder /nowhere/at/all not found"):
        load("/nowhere/at/all")
    with pytest.raises(ConfigError, match="is neither a folder nor a hub name"):
        open_tokenizer("prot_bert")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ResourceError, match=r"^model\.backbone\.source: [^\n]* hub can't be reached[^\n]*$"):
        load("esmeray-tests/not-there")
    # A URL that the hub's client refuses with its own error.
    monkeypatch.setenv("HTTPS_PROXY", "http://host:port")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: httpx.Client())
    with pytest.raises(ConfigError, match="HTTPS_PROXY: can't be used"):
        load("esmeray-tests/not-there")


SPECIAL = ("pad", "unk", "cls", "sep", "mask")


@st.composite
def vocabularies(draw):
    """Draw the vocabulary of a protein BERT: words, letter case, form, missing letters, and maybe an unknown token."""
    letters = AMINO_ACIDS + draw(st.sampled_from(["", "X", "XUBZO"]))
    letters = "".join(draw(st.permutations(letters)))
    spelled = draw(st.sampled_from([str.upper, str.lower]))
    around = draw(st.sampled_from(["[]", "<>"]))
    last = draw(st.sampled_from(["sep", "eos"])) if around == "<>" else "sep"
    names = [last if name == "sep" else name for name in SPECIAL]
    special = [around[0] + (name.upper() if around == "[]" else name) + around[1] for name in names]
    if draw(st.booleans()):
        special.remove(special[1])
    lower_case = draw(st.sampled_from([None, True, False]))
    pieces = draw(st.booleans())  # a piece of a word for each residue too: no blanks are needed
    words = [*special, *map(spelled, letters), *(f"##{spelled(letter)}" for letter in letters if pieces)]
    return words, lower_case, draw(st.booleans()), set("BJOUXZ") - set(letters), len(special) == len(SPECIAL)


@settings(deadline=None, max_examples=40)
@given(vocabularies(), st.data())
def test_any_reading_of_a_vocabulary_that_knows_the_amino_acids_is_found(tmp_path_factory, vocabulary, data):
    words, lower_case, as_json, lacking, has_unknown = vocabulary
    folder = tmp_path_factory.mktemp("vocabulary")
    write_bert(folder, words, lower_case, as_json=as_json)
    ours = open_tokenizer(folder)
    assert isinstance(ours, HuggingFaceTokenizer) and ours.one_token_per_residue
    ids = {word.upper().strip("#"): index for index, word in reversed([*enumerate(words)])}
    names = {word.strip("[]<>").lower().replace("eos", "sep"): index for index, word in enumerate(words)}
    text = data.draw(st.text(AMINO_ACIDS + "X", min_size=1, max_size=60))
    is_piece = not ours.spaced and f"##{words[-1].strip('#')}" in words
    if set(text) & lacking and not has_unknown:
        with pytest.raises(DataError, match=r"unknown to the vocabulary \(X\), which has no unknown token"):
            ours.encode([text])
        return
    ((first, *inner, last),) = whole(ours, [text])
    assert (first, last, ours.mask, ours.pad) == tuple(names[name] for name in ("cls", "sep", "mask", "pad"))
    expected = [ids[letter] if letter in ids else names["unk"] for letter in text]
    assert is_piece or inner == expected
    assert len(inner) == len(text) and len({*inner}) == len({*text}), "each letter has an id of its own"
    assert ours.encode(["A<mask>C"])[0].tolist()[1] == names["mask"]
    assert ours.vocabulary_size == len(words), "no token is added beyond the embedding"
    assert ("X" in lacking) == ("X" in ours.unknown_letters.letters)
    (folder / "saved").mkdir()
    ours.save(folder / "saved")
    (folder / "saved" / "config.json").write_text((folder / "config.json").read_text())
    again = open_tokenizer(folder / "saved")
    assert again.fingerprint == ours.fingerprint and whole(again, [text]) == whole(ours, [text])


def write_bert(folder: Path, words: list[str], lower_case: bool | None, *, as_json: bool) -> None:
    own = {} if lower_case is None else {"do_lower_case": lower_case}
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **own}))
    (folder / "vocab.txt").write_text("\n".join(words) + "\n\n")
    if as_json:
        (folder / "vocab.txt").unlink()
        names = {word.strip("[]<>").lower().replace("eos", "sep"): word for word in words}
        roles = {f"{role}_token": names.get(role) for role in SPECIAL}
        BertTokenizer({word: index for index, word in enumerate(words)}, **roles, **own).save_pretrained(folder)
