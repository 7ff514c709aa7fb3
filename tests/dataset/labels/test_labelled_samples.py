"""The embedded labelled samples are the same for a seed, and can be learnt, but not by heart."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from dataset.fasta.alphabet import AMINO_ACIDS
from dataset.labels.sample_locations import located_records
from dataset.labels.sample_messages import message_records

LOCATIONS = {"cytoplasm", "nucleus", "membrane", "secreted", "mitochondrion", "endoplasmic_reticulum"}


def labels_of(records: list[tuple[str, str]]) -> list[str]:
    return [name.rpartition("_")[0] for name, _ in records]


@pytest.fixture(scope="module")
def proteins() -> list[tuple[str, str]]:
    return list(located_records(1500, 50, seed=0))


@pytest.fixture(scope="module")
def messages() -> list[tuple[str, str]]:
    return list(message_records(1500, seed=0))


def digest(records: list[tuple[str, str]]) -> str:
    return hashlib.sha256("".join(f"{name} {text}\n" for name, text in records).encode()).hexdigest()[:16]


def test_the_samples_of_a_seed_never_change(proteins, messages):
    assert (digest(proteins), digest(messages)) == ("faaf2bdff5fd6806", "1e62fffb78ea52e3"), (
        "raise GENERATOR_VERSION when the samples are meant to change"
    )


@pytest.mark.parametrize("made", [partial(located_records, families=5), message_records])
def test_every_record_asked_for_is_made_and_others_for_another_seed(made: Callable[..., Iterator[tuple[str, str]]]):
    some, others = list(made(40, seed=1)), list(made(40, seed=2))
    assert len({name for name, _ in some}) == 40
    assert len({text for _, text in some} & {text for _, text in others}) < 5


def test_proteins_are_of_six_locations_and_of_amino_acids(proteins):
    counts = Counter(labels_of(proteins))
    assert set(counts) == LOCATIONS
    assert max(counts.values()) < 0.3 * len(proteins)
    assert set("".join(sequence for _, sequence in proteins)) == set(AMINO_ACIDS)
    assert all(sequence[0] == "M" for name, sequence in proteins if name.startswith("nucleus"))


def test_the_end_of_most_proteins_of_the_reticulum_keeps_them_there(proteins):
    ending = Counter(
        label for label, (_, text) in zip(labels_of(proteins), proteins, strict=True) if text[-3:] == "DEL"
    )
    assert ending["endoplasmic_reticulum"] > 0.9 * sum(ending.values())
    assert ending["endoplasmic_reticulum"] > 0.5 * labels_of(proteins).count("endoplasmic_reticulum")


def test_composition_alone_tells_a_part_of_the_locations(proteins):
    shares = np.array([[text.count(letter) / len(text) for letter in AMINO_ACIDS] for _, text in proteins])
    names = labels_of(proteins)
    model = LogisticRegression(C=1e4, max_iter=1000).fit(shares[:1000], names[:1000])
    assert 0.35 < model.score(shares[1000:], names[1000:]) < 0.6


def test_messages_are_of_twelve_intents_that_their_words_mostly_tell(messages):
    texts, names = [text for _, text in messages], labels_of(messages)
    assert len(Counter(names)) == 12
    model = make_pipeline(TfidfVectorizer(), LogisticRegression(C=10)).fit(texts[:1000], names[:1000])
    assert 0.75 < model.score(texts[1000:], names[1000:]) < 0.95
