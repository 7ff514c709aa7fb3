"""Tokens on disk equal the tokenizer's, are written once, and are never read damaged."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from esmeray.common.errors import DataError
from esmeray.dataset.store.reader import Store
from esmeray.dataset.tokens.base import EsmSequenceTokenizer, HuggingFaceTokenizer, train_bpe
from esmeray.dataset.tokens.token_store import LENGTHS_FILE, MANIFEST_FILE, TOKENS_FILE, TokenStore, ensure_tokens
from tests.dataset.stores import make_store

ESM = EsmSequenceTokenizer()
PROTEINS = [("one", "MKTAYIAKQR"), ("two", "G"), ("rare", "MUXBZO"), ("long", "ACDEFGHIKLMNPQRSTVWY" * 50)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(make_store(tmp_path, PROTEINS))


@pytest.fixture(scope="module")
def byte_pairs() -> HuggingFaceTokenizer:
    return train_bpe([sequence for _, sequence in PROTEINS], 300)


def all_pieces(tokens: TokenStore) -> list[list[int]]:
    return [tokens.piece(record, 0, int(length)).tolist() for record, length in enumerate(tokens.lengths)]


def test_tokens_are_those_of_the_tokenizer(store, byte_pairs, tmp_path):
    for tokenizer in (ESM, byte_pairs):
        tokens = ensure_tokens(store, tokenizer, tmp_path / "tokens")
        expected = [tokenizer.encode([store.text(index)])[0].tolist() for index in range(len(store))]
        assert all_pieces(tokens) == expected
        kept = tokens.manifest
        assert (kept.prefix, kept.suffix, kept.pad) == (tokenizer.prefix, tokenizer.suffix, tokenizer.pad)
        assert tokens.manifest.num_records == len(PROTEINS) and tokens.lengths.dtype == np.uint32
        piece = tokens.piece(3, 1, 2)
        assert piece.tolist() == expected[3][1:3]
        assert piece.dtype == (np.uint8 if tokenizer.vocabulary_size <= 256 else np.uint16)
        assert not piece.flags.owndata and not piece.flags.writeable
        for record, start, length in ((1, 0, 99), (0, -1, 2), (0, 5, -1)):
            with pytest.raises(IndexError):
                tokens.piece(record, start, length)


def test_many_blocks_are_the_same_as_one(store, tmp_path, monkeypatch):
    whole = ensure_tokens(store, ESM, tmp_path / "whole")
    monkeypatch.setattr("esmeray.dataset.tokens.token_store._BLOCK_BYTES", 12)
    seen: list[tuple[int, int]] = []
    pieces = ensure_tokens(store, ESM, tmp_path / "pieces", lambda p: seen.append((p.records, p.bytes_read)))
    assert all_pieces(pieces) == all_pieces(whole)
    assert seen == [(2, 11), (3, 17), (4, 1017)]


def test_tokens_are_made_once_for_a_store_and_tokenizer(store, byte_pairs, tmp_path):
    def files() -> dict[Path, int]:
        return {path: path.stat().st_ino for path in (tmp_path / "tokens").rglob("*") if path.is_file()}

    ensure_tokens(store, ESM, tmp_path / "tokens")
    made = files()
    ensure_tokens(Store(store.path), ESM, tmp_path / "tokens")
    assert files() == made
    with pytest.raises(ZeroDivisionError):
        ensure_tokens(store, byte_pairs, tmp_path / "tokens", lambda _: 1 // 0)
    assert files() == made, "what was interrupted leaves nothing"
    ensure_tokens(store, byte_pairs, tmp_path / "tokens")
    assert len(files()) == 2 * len(made)


@pytest.mark.parametrize(
    ("name", "damage"),
    [(TOKENS_FILE, "flip"), (LENGTHS_FILE, "truncate"), (TOKENS_FILE, "remove"), (MANIFEST_FILE, "flip")],
)
def test_damage_is_noticed_and_mended(store, tmp_path, name, damage):
    whole = ensure_tokens(store, ESM, tmp_path / "tokens")
    expected, path = all_pieces(whole), whole.path / name
    content = bytearray(path.read_bytes())
    path.unlink()
    if damage == "flip":
        content[len(content) // 2] ^= 1
    if damage != "remove":
        path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    with pytest.raises(DataError) as refusal:
        TokenStore(whole.path)
    assert "\n" not in str(refusal.value)
    assert all_pieces(ensure_tokens(store, ESM, tmp_path / "tokens")) == expected


def test_a_pickle_and_a_fork_carry_the_path_alone(store, tmp_path):
    tokens = ensure_tokens(store, ESM, tmp_path / "tokens")
    expected = all_pieces(tokens)
    assert len(pickle.dumps(tokens)) < 3000
    assert all_pieces(pickle.loads(pickle.dumps(tokens))) == expected  # noqa: S301
    child = os.fork()
    if not child:
        os._exit(0 if all_pieces(tokens) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
