"""Random mutations of files, as from damage, careless programs or attackers: a few changes per file."""

import gzip
import random
import re
import struct
from collections.abc import Sequence

_NUMBER = re.compile(rb"\d+(\.\d+)?")
_SIZES = [2**63, 2**63 - 1, 2**64 - 1, 2**31, 2**31 - 1, 2**32 - 1, 2**40, 0, 1]
_TOKENS = [
    *(b"%d" % size for size in _SIZES),
    *(b"-1", b"NaN", b"inf", b"1e999", b"null", b"true", b"[]", b"{}", b'""', b"9" * 5000),
    *(b"\0", b"\n", b"\r", b'"', b"'", b",", b";", b"\t", b">", b"#", b"!", b"[", b"{", b"&a ", b"*a", b": "),
    *(b"\xff\xfe", b"\xef\xbb\xbf", b"\xc3", b"\xe2\x80\xa8", b"\x1f\x8b"),
    *(b"A" * 100_000, b"\n" * 10_000, b"[" * 5000, b'{"a":' * 5000, b"&a [*a]", b"<<: *a"),
    *(struct.pack("<Q", size) for size in _SIZES),
    *(struct.pack("<I", size % 2**32) for size in _SIZES),
]


def mutated(seeds: Sequence[bytes], generator: random.Random, may_be_gzip: bool) -> bytes:
    """Return a seed with one to four random changes; sometimes gzipped, and sometimes the gzip is damaged."""
    content = generator.choice(seeds)
    for _ in range(generator.randint(1, 4)):
        content = generator.choice(_CHANGES)(content, seeds, generator)
    if may_be_gzip and generator.random() < 0.1:
        content = gzip.compress(content, 1)
        if generator.random() < 0.5:
            content = generator.choice([_flipped, _rewritten])(content, seeds, generator)
    return content


def _flipped(content: bytes, seeds: Sequence[bytes], generator: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(generator.choice([1, 1, 8]) if content else 0):
        changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def _rewritten(content: bytes, seeds: Sequence[bytes], generator: random.Random) -> bytes:
    """Remove or repeat a stretch, insert a token before it or replace it by one, or cut or exchange the end."""
    start = generator.randint(0, len(content))
    end = start + generator.choice([1, 4, 8, 30, 300])
    token, other = generator.choice(_TOKENS), generator.choice(seeds)
    instead, rest = generator.choice(
        [
            (b"", content[end:]),
            (content[start:end] * generator.choice([2, 4, 51]), content[end:]),
            (token, content[start:]),
            (token, content[start + len(token) :]),
            (b"", b""),
            (b"", other[generator.randint(0, len(other)) :]),
        ]
    )
    return content[:start] + instead + rest


def _renumbered(content: bytes, seeds: Sequence[bytes], generator: random.Random) -> bytes:
    numbers = list(_NUMBER.finditer(content))
    if not numbers:
        return content
    number = generator.choice(numbers)
    return content[: number.start()] + generator.choice(_TOKENS) + content[number.end() :]


_CHANGES = (_flipped, _renumbered, *[_rewritten] * 6)
