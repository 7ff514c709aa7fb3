"""The embedded labelled samples are the same for a seed, and others for another."""

import hashlib
from functools import partial

import pytest

from esmeray.dataset.labels.samples import located_records, message_records


@pytest.fixture(scope="module")
def samples() -> list[list[tuple[str, str]]]:
    return [list(located_records(1500, 50, seed=0)), list(message_records(1500, seed=0))]


def digest(records: list[tuple[str, str]]) -> str:
    return hashlib.sha256("".join(f"{name} {text}\n" for name, text in records).encode()).hexdigest()[:16]


def test_the_samples_of_a_seed_never_change(samples):
    digests = ["faaf2bdff5fd6806", "1e62fffb78ea52e3"]
    assert [*map(digest, samples)] == digests, "raise GENERATOR_VERSION when they are meant to change"


def test_every_record_asked_for_is_made_and_others_for_another_seed():
    for made in (partial(located_records, families=5), message_records):
        some, others = list(made(40, seed=1)), list(made(40, seed=2))
        assert len({name for name, _ in some}) == 40
        assert len({text for _, text in some} & {text for _, text in others}) < 5
