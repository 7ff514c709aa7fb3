"""Tokens on disk equal the tokenizer's, are written once, and are never read damaged."""

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
    for tokenizer, dtype in ((ESM, np.uint8), (byte_pairs, np.uint16)):
        tokens = ensure_tokens(store, tokenizer, tmp_path / "tokens")
        expected = [tokenizer.encode([store.text(index)])[0].tolist() for index in range(len(store))]
        assert all_pieces(tokens) == expected
        kept = tokens.manifest
        assert (kept.prefix, kept.suffix, kept.pad) == (tokenizer.prefix, tokenizer.suffix, tokenizer.pad)
        piece = tokens.piece(3, 1, 2)
        assert piece.tolist() == expected[3][1:3] and piece.dtype == dtype
        assert not piece.flags.owndata and not piece.flags.writeable


@pytest.mark.parametrize(("record", "start", "length"), [(1, 0, 99), (0, -1, 2), (0, 5, -1)])
def test_tokens_beyond_a_record_are_refused(store, tmp_path, record, start, length):
    tokens = ensure_tokens(store, ESM, tmp_path)
    with pytest.raises(IndexError):
        tokens.piece(record, start, length)


def test_many_blocks_are_the_same_as_one(store, tmp_path, monkeypatch):
    whole = ensure_tokens(store, ESM, tmp_path / "whole")
    monkeypatch.setattr("esmeray.dataset.tokens.token_store._BLOCK_BYTES", 12)
    seen: list[tuple[float, int]] = []
    pieces = ensure_tokens(store, ESM, tmp_path / "pieces", lambda done, total, records: seen.append((done, records)))
    assert all_pieces(pieces) == all_pieces(whole)
    assert seen == [(11, 2), (17, 3), (1017, 4)]


def test_tokens_are_made_once_for_a_store_and_tokenizer(store, byte_pairs, tmp_path):
    def files() -> dict[Path, int]:
        return {path: path.stat().st_ino for path in tmp_path.glob("tokens/*/*")}

    ensure_tokens(store, ESM, tmp_path / "tokens")
    made = files()
    ensure_tokens(Store(store.path), ESM, tmp_path / "tokens")
    with pytest.raises(ZeroDivisionError):
        ensure_tokens(store, byte_pairs, tmp_path / "tokens", lambda *_: 1 // 0)
    assert files() == made, "what was interrupted leaves nothing"


@pytest.mark.parametrize("name", [TOKENS_FILE, LENGTHS_FILE, MANIFEST_FILE])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_noticed_and_mended(store, tmp_path, name, damage):
    whole = ensure_tokens(store, ESM, tmp_path)
    expected, path = all_pieces(whole), whole.path / name
    content = path.read_bytes()
    middle = len(content) // 2
    path.unlink()  # this process has mapped the file
    if damage != "remove":
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :] * (damage == "flip"))
    with pytest.raises(DataError, match=r"^[^\n]*$"):
        TokenStore(whole.path)
    assert all_pieces(ensure_tokens(store, ESM, tmp_path)) == expected


def test_a_pickle_carries_the_path_alone(store, tmp_path):
    tokens = ensure_tokens(store, ESM, tmp_path / "tokens")
    expected = all_pieces(tokens)
    pickled = pickle.dumps(tokens)
    assert len(pickled) < 3000 and all_pieces(pickle.loads(pickled)) == expected  # noqa: S301
