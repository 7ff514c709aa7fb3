"""The embedded sample is the same for a seed, and looks like proteins."""

import hashlib

import pytest

from esmeray.dataset.store.sample import sample_records


@pytest.fixture(scope="module")
def records() -> list[tuple[str, str]]:
    return list(sample_records(2000, 50, seed=0))


def test_the_sample_of_a_seed_never_changes(records):
    digest = hashlib.sha256("".join(f">{name}\n{sequence}\n" for name, sequence in records).encode()).hexdigest()
    assert digest.startswith("d09f61cd429c9db1dcb4fc7b87b554a6"), (
        "raise GENERATOR_VERSION when the sample is meant to change"
    )


@pytest.mark.parametrize(("number", "families"), [(10, 3), (2, 5), (1, 1)])
def test_every_record_asked_for_is_made(number, families):
    made = list(sample_records(number, families, seed=0))
    assert len(made) == len({name for name, _ in made}) == number
