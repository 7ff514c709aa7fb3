"""Reader of W&B's .wandb files: wandb's protobuf records in LevelDB's log format.

wandb 0.31 reads them in its Go program only, so the framing is read here
(https://github.com/google/leveldb/blob/main/doc/log_format.md, with W&B's seven-byte header in front).
"""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

Record: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]  # made when protobuf loads its description
BLOCK_BYTES = 32768
HEADER = struct.Struct("<IHB")  # CRC, length, type
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_records(path: Path) -> list[Record]:
    """Return all records of a file after checking the CRCs."""
    data = path.read_bytes()
    assert data[:4] == b":W&B", data[:7]
    records, parts, position = [], [], 7
    while position + HEADER.size <= len(data):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < HEADER.size:
            position += left_in_block
            continue
        checksum, length, kind = HEADER.unpack_from(data, position)
        chunk = data[position + HEADER.size : position + HEADER.size + length]
        position += HEADER.size + length
        if kind == 0:
            break
        assert checksum == zlib.crc32(bytes([kind]) + chunk)  # unmasked IEEE, where LevelDB masks Castagnoli's
        parts.append(chunk)
        if kind in (FULL, LAST):
            records.append(Record.FromString(b"".join(parts)))
            parts = []
    return records


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return the logged rows in order, without W&B's own columns (_step, _timestamp ...)."""
    rows = []
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in items.items() if not name.startswith("_")})
    return rows
