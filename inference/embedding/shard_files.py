"""Files of a job's shards, and which of them are complete.

In: arrays of a shard by output. Out: ``OUTPUT/00012.safetensors`` for each output, then ``rows/00012.json``, by which
the shard counts as done.
"""

from collections.abc import Mapping
from pathlib import Path

from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from common.publishing import file_xxh128, write_atomically, writing
from dataset.embeddings.arrays import write_arrays

Computed = Mapping[str, Mapping[str, NDArray]]
"""Arrays by name, by output."""

_ROWS = "rows"


class ShardRow(BaseModel):
    """Facts of a shard, beside its files.

    Attributes:
        xxh128: of each output's file.
        seconds: of its computation.
        batch_s: of each batch after the warm-up, in turn.
        splits: batches that were split for want of memory.
        flops: of its forward passes, padding left out.
        peak_bytes, mean_bytes: of memory in use: on CUDA the allocator's, else the process's resident memory.
        cached: its values come from the cache.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int
    sequences: int
    residues: int
    tokens: int
    xxh128: dict[str, str] = {}
    batches: int = 0
    seconds: float = 0.0
    batch_s: list[float] = []
    splits: int = 0
    flops: float = 0.0
    peak_bytes: int = 0
    mean_bytes: int = 0
    cached: bool = False


class ShardFiles:
    """The shards of a job in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, output: str, number: int) -> Path:
        return self.folder / output / f"{number:05d}.safetensors"

    def write(self, computed: Computed, row: ShardRow) -> ShardRow:
        """Write a shard; complete when this returns its row. Raises ResourceError where the disk is full."""
        checksums = {}
        for output, arrays in computed.items():
            path = self.path(output, row.number)
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_arrays(path, arrays)
            checksums[output] = file_xxh128(path)
        done = row.model_copy(update={"xxh128": checksums})
        with writing(self.folder):
            (self.folder / _ROWS).mkdir(exist_ok=True)
            write_atomically(self.folder / _ROWS / f"{row.number:05d}.json", done.model_dump_json())
        return done

    def done(self) -> dict[int, ShardRow]:
        """Complete shards whose files are there, by number; sweeps what a killed process left."""
        rows = {}
        for path in sorted(self.folder.rglob("*")):
            if path.suffix == ".tmp":
                path.unlink(missing_ok=True)
            elif path.parent.name == _ROWS:
                row = self._row(path)
                if row is not None:
                    rows[row.number] = row
        return rows

    def _row(self, path: Path) -> ShardRow | None:
        try:
            row = ShardRow.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None
        whole = all(self.path(output, row.number).is_file() for output in row.xxh128)
        return row if whole and row.xxh128 else None
