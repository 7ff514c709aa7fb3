"""Join embeddings of several models by id: one vector per protein, with the channels of all models.

The folders have the same proteins, in any order. The output has the order of the first folder, and its embeddings.json
lists the channels of each. Memory holds the ids only. Read the output with esmeray.read_embeddings.

Examples:
  esmeray embed join --join.folders esm2 prot_t5 --join.output both
  esmeray embed join --join.folders esm2 esm2 --join.names mean cls --join.output mean_cls --join.format npy
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from esmeray.common.errors import ConfigError, DataError, did_you_mean
from esmeray.common.progress import record_bar
from esmeray.common.text import counted
from esmeray.dataset.embeddings.arrays import scratch_array
from esmeray.dataset.embeddings.formats.base import Block, Source, Values
from esmeray.dataset.embeddings.formats.registry import FORMATS, TABLE_FORMATS
from esmeray.dataset.embeddings.manifest import (
    Dtype,
    EmbeddingsManifest,
    OutputManifest,
    ranges,
    write_index,
    write_manifest,
    write_training,
)
from esmeray.dataset.embeddings.reader import Embeddings, open_vectors
from esmeray.tools.grammar import OutputWriter, command
from esmeray.train_config.section import Section


class JoinSection(Section):
    """Folders to join, and output folder."""

    folders: list[Path] = Field(min_length=2)
    """Folders of embeddings, at least two."""
    output: Path
    """Folder to write the results to."""
    names: list[str] = Field(default=[])
    """Output to take from each folder. Default: its first."""
    format: str | None = None
    """File format: parquet, npy or lance. Default: npy if the first folder has it, otherwise parquet."""


@command("embed join", __doc__, made_by="concat_embeddings")
def main(join: JoinSection, writer: OutputWriter) -> None:
    folders, output = join.folders, join.output
    writer.refuse_existing(output)
    # Checked here: a Literal in the schema would be a second list of formats next to the registry.
    if join.format not in (None, *TABLE_FORMATS):
        raise ConfigError(
            f"--join.format {join.format}: expected one of {', '.join(TABLE_FORMATS)}"
            f"{did_you_mean(str(join.format), TABLE_FORMATS)}"
        )
    names: Sequence[str | None] = join.names or [None] * len(folders)
    if len(names) != len(folders):
        raise ConfigError(
            f"--join.names: {len(names)} names for {len(folders)} folders; give one per folder, in the same order"
        )
    # Keyed by folder and output. This key names the columns in the manifest, so it must be unique.
    sources = {f"{source.source}/{source.name}": source for source in map(open_vectors, folders, names)}
    if len(sources) < len(folders):
        raise ConfigError("the same output of a folder is given twice; choose another with --join.names")
    first = next(iter(sources.values()))
    file_format = join.format or ("npy" if first.output.format == "npy" else "parquet")
    with record_bar("joining") as bar, writer.folder(output) as building:
        joined = _join(building, sources, file_format, bar)
    shape = f"{counted(len(first), 'record{s}')} with {joined.channels:,} channels"
    print(f"{output}: {shape}, {joined.dtype}, {joined.format}, {(output / joined.files[0]).stat().st_size:,} bytes")
    print("\n".join(f"  {channels:>7,}  {name}" for name, channels in joined.columns.items()))


def _join(
    building: Path, sources: dict[str, Embeddings], file_format: str, show: Callable[[float, int], None]
) -> OutputManifest:
    """Write the output ``joined`` of named sources to a folder, in their common dtype, or fp32 if their dtypes differ.

    Raises DataError if ids repeat or differ, or if a vector is not finite.
    """
    first, *_ = sources.values()
    orders = _orders(list(sources.values()))  # validates before anything is written

    def blocks(rows: int) -> Iterator[Block]:
        streams = []
        for source, order_N in zip(sources.values(), orders, strict=True):
            streams.append(_in_order(source, order_N, rows, building))
        for start, stop in ranges(len(first), rows):
            vectors_nC = np.concatenate([next(stream) for stream in streams], axis=1)
            yield Block(first.ids[start:stop], first.lengths[start:stop], vectors_nC)
            show(stop / len(first), stop)

    output = FORMATS[file_format].merge(building, "joined", _joined(sources, file_format), Source(len(first), blocks))
    # Records and their order are taken from the first source, and so is the index, parts included.
    columns = {name: first.column(name) for name in ("id", "length", "hash", "second_hash")}
    columns["sequence"] = pa.array(first.sequences)
    write_index(building, [columns])
    write_training(building, sources.values())
    manifest = EmbeddingsManifest(
        num_records=len(first),
        num_sequences=len(np.unique(first.sequences)),
        outputs={"joined": output},
        job={"joined": {name: source.manifest.job for name, source in sources.items()}},
    )
    write_manifest(building, manifest)
    return output


def _joined(sources: dict[str, Embeddings], file_format: str) -> OutputManifest:
    """Describe the output of the sources' channels, one source after the other."""
    dtypes = set()
    descriptions: list[str] = []
    columns: dict[str, int] = {}
    scales: list[float] = []
    for name, source in sources.items():
        # Parts have int8 scales of their own, so there is no common scale per channel.
        has_scales_by_part = source.output.dtype == "int8" and len(source.parts) > 1
        dtypes.add("fp32" if has_scales_by_part else source.output.dtype)
        descriptions.append(f"{name}: {source.output.description}")
        columns[name] = source.channels
        scales += source.output.scales or []
    dtype: Dtype = dtypes.pop() if len(dtypes) == 1 else "fp32"
    return OutputManifest(
        description=" | ".join(descriptions),
        per="protein",
        channels=sum(columns.values()),
        dtype=dtype,
        format=file_format,
        scales=scales if dtype == "int8" else None,
        columns=columns,
    )


def _orders(sources: Sequence[Embeddings]) -> list[NDArray[np.int32]]:
    """Return for each source (N,) the position of its records in the first source."""
    first = sources[0].column("id")
    orders = []
    for source in sources:
        ids = source.column("id")
        counts = ids.value_counts()
        _refuse(
            source, counts.field("values").filter(pc.greater(counts.field("counts"), 1)), "occurring more than once"
        )
        _refuse(source, first.filter(pc.invert(pc.is_in(first, ids))), f"of {sources[0].source} missing")
        _refuse(source, ids.filter(pc.invert(pc.is_in(ids, first))), f"not in {sources[0].source}")
        # Each id now occurs exactly once, so the order is a permutation.
        order_N = pc.index_in(ids, first).to_numpy()
        sources[0].refuse_other_sequences(order_N, source.sequence_keys, source.source)
        orders.append(order_N)
    return orders


def _refuse(source: Embeddings, ids: Any, problem: str) -> None:
    if len(ids):
        shown = ", ".join(ids[:10].to_pylist())
        raise DataError(f"{source.source}: {len(ids):,} ids {problem}: {shown}{', ...' if len(ids) > 10 else ''}")


def _in_order(source: Embeddings, order_N: NDArray[np.int32], rows: int, folder: Path) -> Iterator[Values]:
    """Yield blocks of a source in the order of the first. A reordered copy is written to ``folder``."""
    if (order_N == np.arange(len(source))).all():
        yield from (block_nC for _, block_nC in source.finite_blocks(rows))
        return
    ordered_NC = scratch_array(folder, (len(source), source.channels), np.float32)
    for start, block_nC in source.finite_blocks(rows):
        ordered_NC[order_N[start : start + len(block_nC)]] = block_nC
    yield from (ordered_NC[start:stop] for start, stop in ranges(len(source), rows))
