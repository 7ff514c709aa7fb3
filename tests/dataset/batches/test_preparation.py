"""A prepared batch holds the cropped, tokenized and masked sequences of its records, whatever else is in it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.batches.cropping import crop_starts
from dataset.batches.preparation import PreparationSettings, prepare_batch
from dataset.tokens.esm import encode
from train_config.schema import MaskedLMSection

texts = st.lists(st.text(alphabet="ACDEFGHIKLMNPQRSTVWYX", min_size=1, max_size=40), min_size=1, max_size=6)


class Sequences:
    """The least that can stand for a store."""

    def __init__(self, sequences: list[str]) -> None:
        self.sequences = [text.encode() for text in sequences]
        self.lengths = np.array([len(text) for text in sequences], dtype=np.uint32)

    def windows(self, records: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> list[bytes]:
        places = zip(records, starts, lengths, strict=True)
        return [self.sequences[record][start : start + length] for record, start, length in places]


def preparation(max_length: int = 20, random_crops: bool = True, masked: bool = False) -> PreparationSettings:
    return PreparationSettings(max_length, 3, random_crops, MaskedLMSection() if masked else None)


@settings(deadline=None)
@given(sequences=texts, epoch=st.integers(0, 3), data=st.data())
def test_tokens_are_those_of_the_cropped_sequences(sequences, epoch, data):
    records = np.array(data.draw(st.permutations(range(len(sequences)))))
    store = Sequences(sequences)
    prepared = prepare_batch(store, preparation(), epoch, records)
    starts = crop_starts(store.lengths[records], 20, records, 3, epoch)
    for place, (record, start) in enumerate(zip(records, starts, strict=True)):
        tokens = prepared.tokens[prepared.cu_seqlens[place] : prepared.cu_seqlens[place + 1]]
        assert tokens.tolist() == encode(sequences[record][start : start + 20]).tolist()


@settings(deadline=None)
@given(sequences=texts)
def test_validation_crops_at_the_start(sequences):
    prepared = prepare_batch(Sequences(sequences), preparation(10, random_crops=False), 5, np.arange(len(sequences)))
    expected = [token for text in sequences for token in encode(text[:10]).tolist()]
    assert prepared.tokens.tolist() == expected


@settings(deadline=None)
@given(sequences=texts, masked=st.booleans())
def test_result_does_not_depend_on_the_other_records_of_the_batch(sequences, masked):
    store = Sequences(sequences)
    together = prepare_batch(store, preparation(masked=masked), 1, np.arange(len(sequences)))
    for record in range(len(sequences)):
        own = slice(*together.cu_seqlens[record : record + 2])
        alone = prepare_batch(store, preparation(masked=masked), 1, np.array([record]))
        assert (alone.tokens == together.tokens[own]).all()
        assert (alone.targets == together.targets[own]).all()
