"""The embedded sample is the same for a seed, and looks like proteins."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest

from dataset.fasta.alphabet import AMINO_ACIDS
from dataset.store.sample import BACKGROUND, MAX_LENGTH, MEDIAN_LENGTH, MIN_LENGTH, sample_records


@pytest.fixture(scope="module")
def records() -> list[tuple[str, str]]:
    return list(sample_records(2000, 50, seed=0))


def test_the_sample_of_a_seed_never_changes(records):
    digest = hashlib.sha256("".join(f">{name}\n{sequence}\n" for name, sequence in records).encode()).hexdigest()
    assert digest.startswith("d09f61cd429c9db1dcb4fc7b87b554a6"), (
        "raise GENERATOR_VERSION when the sample is meant to change"
    )


def test_another_seed_gives_other_sequences(records):
    other = {sequence for _, sequence in sample_records(200, 5, seed=1)}
    assert not other & {sequence for _, sequence in records}


def test_ids_are_unique_and_name_the_family(records):
    assert len({name for name, _ in records}) == 2000
    assert records[40 * 12 + 34][0] == "family012_0034"


@pytest.mark.parametrize(("number", "families"), [(10, 3), (2, 5), (1, 1)])
def test_every_record_asked_for_is_made(number, families):
    made = list(sample_records(number, families, seed=0))
    assert len(made) == len({name for name, _ in made}) == number


def test_lengths_follow_those_of_uniref(records):
    lengths = np.array([len(sequence) for _, sequence in sample_records(400, 400, seed=3)])
    assert lengths.min() >= MIN_LENGTH
    assert lengths.max() <= MAX_LENGTH
    assert abs(np.median(lengths) / MEDIAN_LENGTH - 1) < 0.1


def test_residues_follow_the_background_and_start_with_methionine(records):
    counts = Counter("".join(sequence for _, sequence in records))
    assert set(counts) == set(AMINO_ACIDS)
    shares = np.array([counts[letter] for letter in AMINO_ACIDS]) / sum(counts.values())
    assert np.abs(shares - BACKGROUND).sum() / 2 < 0.08
    assert all(sequence.startswith("M") for _, sequence in records)


def test_members_of_a_family_are_alike_and_members_of_two_are_not(records):
    def shared_words(a: str, b: str) -> float:
        words = [{sequence[at : at + 4] for at in range(len(sequence) - 3)} for sequence in (a, b)]
        return len(words[0] & words[1]) / min(map(len, words))

    family = [sequence for name, sequence in records if name.startswith("family000")]
    strangers = [sequence for name, sequence in records if name.endswith("_0000")][1:40]
    within = np.mean([shared_words(family[0], other) for other in family[1:]])
    between = np.mean([shared_words(family[0], other) for other in strangers])
    assert within > 4 * between
