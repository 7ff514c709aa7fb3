"""Texts whose 64-bit hashes are equal."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from esmeray.dataset.fasta import reader, records

COLLIDING = (("nL42ZpgH", "vHzMB8D"), ("a9goooTw", "RUJjxgS"), ("WB2ZIDnm", "dbt4ivm"))
"""Pairs of one XXH3-64. Texts of 4 to 8 bytes are hashed by steps that can each be inverted; the length enters last."""


@contextmanager
def hashes_of_one_bit() -> Iterator[None]:
    """A block in which half of all texts have one hash; second hashes, by a seed, are as ever."""
    digest = records.xxhash.xxh3_64_intdigest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "load_kernel", lambda: None)  # it calls XXH3-64 itself
        patch.setattr(
            records.xxhash,
            "xxh3_64_intdigest",
            lambda text, seed=0: digest(text, seed) if seed else digest(text) >> 63,
        )
        yield
