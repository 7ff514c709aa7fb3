"""JSON that others give is a dictionary, or refused in one line."""

from pathlib import Path

import pytest

from esmeray.common.errors import DataError, read_json


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"3", b'"text"', b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 100_000],
    ids=lambda content: content[:6].decode("latin-1"),
)
def test_what_is_no_dictionary_is_refused_in_one_line(tmp_path: Path, content: bytes):
    path = tmp_path / "esmeray.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"^.*esmeray\.json: damaged \(.+\); copy it again$") as refused:
        read_json(path, "copy it again")
    assert len(str(refused.value)) < 400
