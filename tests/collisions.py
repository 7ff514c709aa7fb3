"""Texts with equal 64-bit hashes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from esmeray.dataset.fasta import reader, records

COLLIDING = (("nL42ZpgH", "vHzMB8D"), ("a9goooTw", "RUJjxgS"), ("WB2ZIDnm", "dbt4ivm"))
"""Pairs with equal XXH3-64. Collisions can be computed: each step of the hash of 4 to 8 bytes is invertible."""


@contextmanager
def hashes_of_one_bit() -> Iterator[None]:
    """Reduce hashes to one bit in the block, so that half of all texts collide; seeded second hashes stay unchanged."""
    digest = records.xxhash.xxh3_64_intdigest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "load_kernel", lambda: None)  # the compiled kernel has its own XXH3-64
        patch.setattr(
            records.xxhash,
            "xxh3_64_intdigest",
            lambda text, seed=0: digest(text, seed) if seed else digest(text) >> 63,
        )
        yield
