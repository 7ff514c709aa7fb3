"""The embedded labelled samples are the same for a seed."""

import hashlib

from esmeray.dataset.labels.samples import located_records, message_records


def digest(records: list[tuple[str, str]]) -> str:
    return hashlib.sha256("".join(f"{name} {text}\n" for name, text in records).encode()).hexdigest()[:16]


def test_the_samples_of_a_seed_never_change_and_hold_every_record():
    samples = [list(located_records(1500, 50, seed=0)), list(message_records(1500, seed=0))]
    digests = ["faaf2bdff5fd6806", "1e62fffb78ea52e3"]
    assert [*map(digest, samples)] == digests, "raise GENERATOR_VERSION when they are meant to change"
    assert [len({name for name, _ in records}) for records in samples] == [1500] * 2
