"""The embedded samples are reproducible by their seed."""

import hashlib

import pytest

from esmeray.dataset.labels.samples import located_records, message_records
from esmeray.dataset.store.sample import sample_records

SAMPLES = {
    "proteins": (lambda: sample_records(2000, 50, seed=0), 2000, "0a2269dffa82c5e4"),
    "located": (lambda: located_records(1500, 50, seed=0), 1500, "faaf2bdff5fd6806"),
    "messages": (lambda: message_records(1500, seed=0), 1500, "1e62fffb78ea52e3"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_sample_of_a_seed_never_changes_and_holds_every_record(name):
    make, number, digest = SAMPLES[name]
    records = list(make())
    text = "".join(f"{name} {text}\n" for name, text in records)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest, "raise GENERATOR_VERSION where it is to change"
    assert len({name for name, _ in records}) == number
