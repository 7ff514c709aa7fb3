"""The file that records were read from, as a manifest keeps it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SourceFile(BaseModel):
    """One file that a store was made of, as it was then; ``xxh128`` is of the bytes on disk, compressed or not."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    bytes: int
    mtime_ns: int
    xxh128: str
