"""The table tokenizer returns the same ids as transformers' EsmTokenizer on any text."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import EsmTokenizer

from esmeray.common.errors import DataError
from esmeray.dataset.tokens.esm import MASK, STANDARD_RESIDUES, VOCABULARY, encode, pack_sequences

RESIDUES = "LAGVSERTIDPKQNFYMHWCXBUZO.-"
PIECES = [
    *VOCABULARY,
    *"JacdkX*123 \t\n\r\x00\x1c\x85\xa0<>_é中🧬\u2028\u3000",
    *("<mas", "mask>", "<<mask>>", "<MASK>", "<null_1", "null_1>", "<cls", "< eos >", "xx", "unk", "\ud800"),
    *("mktay", "MjJ JK", " <cls>MK<eos> ", "M\u00a0K\u2003xK"),
]
sequences = st.text(alphabet=RESIDUES, max_size=60)
any_text = st.one_of(sequences, st.text(max_size=40), st.lists(st.sampled_from(PIECES), max_size=20).map("".join))


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> EsmTokenizer:
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    return EsmTokenizer(str(path))


@settings(deadline=None, max_examples=50)
@given(text=any_text)
def test_ids_are_those_of_transformers_on_any_text(reference, text):
    assert encode(text).tolist() == reference(text)["input_ids"]
    assert reference.mask_token_id == MASK
    assert "".join(VOCABULARY[index] for index in STANDARD_RESIDUES) == "LAGVSERTIDPKQNFYMHWC"


@settings(deadline=None, max_examples=50)
@given(texts=st.lists(any_text | st.sampled_from(["\xff\xfe", "M\xfe", "\x00\x01"]), min_size=1, max_size=8))
def test_packed_text_is_each_sequence_encoded_alone_whatever_the_text(texts):
    batch = pack_sequences(texts)
    alone = [encode(text).tolist() for text in texts]
    assert batch.tokens.tolist() == [token for ids in alone for token in ids]
    assert batch.cu_seqlens.diff().tolist() == [len(ids) for ids in alone]
    assert batch.cu_seqlens.dtype == torch.int32 and batch.cu_seqlens[0] == 0
    assert batch.records.tolist() == list(range(len(texts))) and not batch.by_token
    assert batch.positions.tolist() == [position for ids in alone for position in range(len(ids))]
    assert batch.max_seqlen == max(map(len, alone))


def test_packing_no_text_is_refused():
    with pytest.raises(DataError, match="no sequences to pack"):
        pack_sequences([])
