"""A value or manifest that is not exactly what was written is refused."""

import json
import random
import zlib

import pytest

from esmeray.common.errors import DataError
from esmeray.dataset.store.format import FORMAT_VERSION, HEADER_BYTES, Kind, frame, signed_json, unframe
from esmeray.dataset.store.reader import Store


def test_any_flipped_bit_of_a_frame_is_noticed():
    clean = frame(Kind.LENGTHS, 0, 4, [b"sixteen bytes..."])
    for bit in range(8 * len(clean)):
        damaged = bytearray(clean)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"header|checksum|bytes"):
            unframe(memoryview(bytes(damaged)), Kind.LENGTHS)
    for length in (0, 10, 39, 50):
        with pytest.raises(ValueError, match=r"header|bytes"):
            unframe(memoryview(clean[:length]), Kind.LENGTHS)
    with pytest.raises(ValueError, match="not that of a HASHES"):
        unframe(memoryview(clean), Kind.HASHES)
    header, payload = clean[: HEADER_BYTES - 4], clean[HEADER_BYTES:]
    assert int.from_bytes(clean[HEADER_BYTES - 4 : HEADER_BYTES], "little") == zlib.crc32(header + payload)


def test_any_flipped_bit_of_a_manifest_is_noticed(store_path):
    path = store_path / "manifest.json"
    clean = path.read_bytes()
    generator = random.Random(0)
    for _ in range(200):
        damaged = bytearray(clean)
        damaged[generator.randrange(len(clean))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        try:
            manifest = Store(store_path).manifest
        except DataError:
            continue
        # A flip between two kinds of white space changes nothing that the manifest says.
        assert signed_json(manifest).encode() == clean


def test_a_manifest_of_another_version_says_so(store_path):
    path = store_path / "manifest.json"
    content = json.loads(path.read_text()) | {"format_version": FORMAT_VERSION + 1}
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"format version {FORMAT_VERSION + 1}, this Esmeray reads version"):
        Store(store_path)
