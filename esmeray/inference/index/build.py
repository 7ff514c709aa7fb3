"""Build an index from folders of embeddings, or extend one.

Vectors are read once, one part in memory at a time; a compressed index is trained on a sample first. All ids are
compared beforehand, with 48 bytes per id in temporary files: 24 for a cryptographic digest of the id with its row, 16
for both hashes of the sequence, and 8 for the row of a new id. ``OUTPUT.partial`` holds the finished parts, and the
same command resumes there. The index appears when it is complete. An extension hard-links the existing parts and adds
new ones. Nothing is rewritten, so readers of the old index are not affected.

Shape legend: N rows of the index and its sources, n rows of a part or a block, C channels.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import ConfigError, DataError, parsing, read_json
from esmeray.common.progress import record_bar
from esmeray.common.publishing import (
    check_file,
    file_xxh128,
    grown_folder,
    link,
    listed_names,
    made_folder,
    recover,
    refuse_existing,
    resolved,
    write_atomically,
)
from esmeray.common.remote import discard_work, local_path, publish, target_path
from esmeray.dataset.embeddings.arrays import scratch_array, write_arrays, write_checksums
from esmeray.dataset.embeddings.formats.base import Values
from esmeray.dataset.embeddings.manifest import INDEX_ROWS, MANIFEST_FILE, differ, ranges, write_training
from esmeray.dataset.embeddings.reader import Embeddings, open_vectors
from esmeray.dataset.sequence_list import checked_list
from esmeray.inference.embedding.section import report_name
from esmeray.inference.index.exact import ExactIndex, exact_arrays
from esmeray.inference.index.index import Index
from esmeray.inference.index.metric import MetricName, prepared, unusable
from esmeray.inference.index.parts import (
    INDEX_FILE,
    TRAINED_FILE,
    IndexManifest,
    Kind,
    PartEntry,
    SourceModel,
    id_arrays,
    read_index_manifest,
)
from esmeray.inference.index.search import open_index
from esmeray.run_folder.job import Journal, accept, journal, unfinished
from esmeray.train_config.section import Section

if TYPE_CHECKING:
    from esmeray.inference.settings import BuildIndexSettings

MADE_BY = "index"
PART_BYTES = 2**29
"""Maximum size in bytes of a part's fp32 vectors, which are in memory together."""
PART_ROWS = 2**21
"""Maximum rows of a part. With short vectors the ids would otherwise dominate memory."""
_SAMPLED = 64
"""Training vectors per cluster of a compressed index."""
_MIN_SAMPLED = 39
"""Minimum training vectors per cluster that faiss asks for."""
_BLOCK = 16_384


class IndexSection(Section):
    """The index to create or extend."""

    output: Path
    """Folder to create, or its URI. An existing index gets the vectors whose ids it lacks."""
    kind: Kind | None = None
    """Kind of index. exact: the same hits as a comparison with every vector; compressed: searches the nearest clusters
    only, with one bit per value in memory. Default: exact, or the existing index's kind.
    """
    metric: MetricName | None = None
    """Similarity metric: cosine, dot or l2. Default: cosine, or the existing index's metric."""
    name: str | None = None
    """Output of the embedding folders. Default: their first, or the existing index's output."""


class NewRows(NamedTuple):
    """Records of a source whose ids occur neither in the index nor in earlier sources."""

    source: Embeddings
    records: NDArray[np.integer]

    def blocks(self, size: int) -> Iterator[tuple[int, int, NDArray[np.integer]]]:
        """Yield start and stop of each source block with new records, and the records' offsets in the block."""
        for start, stop in ranges(len(self.source), size):
            chosen = self.records[slice(*self.records.searchsorted([start, stop]))]
            if len(chosen):  # otherwise nothing in the block is new, and it is not read
                yield start, stop, chosen - start

    def ids_and_keys(self) -> Iterator[tuple[list[str], NDArray[np.uint64]]]:
        """Yield ids and sequence keys (n, 2), in blocks."""
        for start, stop, chosen in self.blocks(INDEX_ROWS):
            ids = self.source.column("id", start, stop).take(chosen).to_pylist()
            yield ids, self.source.sequence_keys_of(start, stop)[chosen]


class Built(NamedTuple):
    """The current index, the number of ``new`` vectors, and the number of source vectors whose ids were ``known``."""

    manifest: IndexManifest
    new: int
    known: int

    def __repr__(self) -> str:
        size = f"{self.manifest.count:,} of {self.manifest.channels:,}"
        return (
            f"Built({self.manifest.kind} index, {self.manifest.metric}, {size}; {self.new:,} new, {self.known:,} known)"
        )


def build_index(
    vectors: Sequence[str | Path],
    output: str | Path,
    *,
    overwrite: bool = False,
    **settings: "Unpack[BuildIndexSettings]",
) -> Built:
    """Build an index of proteins' embeddings, or extend one, as ``esmeray embed index``.

    Args:
        vectors: folders of embeddings, or URIs of them.
        output: folder to make, or the URI of one. An index that is there gets the vectors whose ids it lacks.
        overwrite: replace an index in place of extending it.
        settings: others of the command: ``kind``, ``metric`` and ``name``.

    Returns the manifest of the index, and the number of new and of known vectors; :func:`esmeray.search` takes the
    output. Raises EsmerayError for what the command refuses.

    >>> esmeray.build_index(["vectors"], "proteins.index")
    Built(exact index, cosine, 3 of 320; 3 new, 0 known)
    >>> esmeray.build_index(["vectors"], "proteins.index").known
    3
    """
    sources = [Path(str(source)) for source in checked_list(vectors, "vectors", "paths")]
    if not sources:
        raise ConfigError("vectors: give at least one folder of embeddings")
    return make_index(sources, IndexSection.of(output=output, **settings), overwrite=overwrite)


def make_index(sources: Sequence[Path], section: IndexSection, *, overwrite: bool = False) -> Built:
    """Build an index of the folders' vectors, or extend it with the vectors whose ids it lacks.

    Raises ConfigError if the output is not an index, is of another kind, or is another job's unfinished index;
    DataError for damaged sources, vectors of another model, layer or pooling, and vectors that can't be compared;
    ResourceError if the disk is full.
    """
    output = target_path(section.output, overwrite)
    recover(output)
    base: Path | None = None
    if overwrite or not (output / INDEX_FILE).is_file():
        refuse_existing(output, MADE_BY, overwrite)
    else:
        # For a URI only the manifests have been downloaded so far; an extension links the existing files and needs the
        # clusters. Objects that no manifest lists remain from an interrupted upload and are ignored.
        listed = listed_names(output, MADE_BY)
        base = resolved(local_path(section.output, listed.__contains__))
    with unfinished(output, MADE_BY) as partial:
        # Read under the lock, because another process may have extended the index meanwhile.
        before = None if base is None else read_index_manifest(base)
        name = section.name or (before.output if before else None)
        opened = [open_vectors(local_path(source), name) for source in sources]
        manifest = _manifest(section, opened, before)
        rows = list(new_rows(opened, None if base is None else open_index(section.output), partial))
        new = sum(len(group.records) for group in rows)
        total = sum(map(len, opened))
        if not new and before is not None:
            discard_work(section.output)
            return Built(before, 0, total)
        job = {
            **manifest.model_dump(mode="json", exclude={"model"}),
            "sources": [file_xxh128(part.folder / MANIFEST_FILE) for source in opened for part in source.parts],
        }
        accept(partial, job)
        with journal(partial) as done, record_bar("indexing") as bar:
            trained = _trained(partial, base, manifest, rows)
            complete = _grown(partial, done, manifest, rows, trained, lambda count: bar(count / new, count))
        making = made_folder(output, MADE_BY, overwrite) if base is None else grown_folder(output, base, MADE_BY)
        with making as building:
            files = [file for part in complete.parts[len(manifest.parts) :] for file in part.files]
            if trained is not None and base is None:
                files.append(TRAINED_FILE)
            for file in files:
                link(partial / file, building / file)
            if base is None:
                write_training(building, opened[:1])
            write_atomically(building / INDEX_FILE, complete.model_dump_json(indent=1) + "\n")
        publish(section.output)
        return Built(complete, new, total - new)


def memory_index(source: Embeddings, metric: MetricName) -> ExactIndex:
    """An exact index of a folder's vectors in memory: 4 bytes per value, or 6 with bf16 products."""
    from esmeray.common.processor import cpu_computes_bf16

    pieces = [
        NewRows(source, np.arange(start, stop)) for start, stop in ranges(len(source), _part_rows(source.channels))
    ]
    parts = [
        {
            **id_arrays(piece.ids_and_keys()),
            **exact_arrays(metric, _vectors([piece], metric), with_filter=cpu_computes_bf16()),
        }
        for piece in pieces
    ]
    manifest = _manifest(IndexSection(output=source.folder, metric=metric), [source], None)
    entries = [PartEntry(rows=len(piece.records)) for piece in pieces]
    return ExactIndex(source.folder, manifest.model_copy(update={"parts": entries}), parts)


def _manifest(section: IndexSection, sources: Sequence[Embeddings], before: IndexManifest | None) -> IndexManifest:
    """Manifest of a new index, or of the existing one. Raises ConfigError for incompatible settings or sources."""
    first = sources[0]
    for source in sources[1:]:
        source.refuse_other_space(first)
    if before is None:
        return IndexManifest(
            kind=section.kind or "exact",
            metric=section.metric or "cosine",
            output=first.name,
            channels=first.channels,
            made_of=first.manifest.space(first.name),
            model=_model_of(first),
            parts=[],
        )
    for name, wanted, there in (
        ("kind", section.kind, before.kind),
        ("metric", section.metric, before.metric),
        ("name", section.name, before.output),
    ):
        if wanted not in (None, there):
            raise ConfigError(
                f"--index.{name} {wanted}: {section.output} has {name} {there}; choose another --index.output"
            )
    return before


def _model_of(source: Embeddings) -> SourceModel | None:
    """Model of an embedding job, if its report names one."""
    report = next(source.folder.glob(report_name("*")), None)
    if report is None or "settings" not in source.manifest.job:
        return None
    content = read_json(report, "remove it")
    with parsing(report, "remove it"):
        name = Path(content["model"])
        return SourceModel(
            # An absolute path, so that queries can be embedded from any working folder.
            source=str(name.absolute() if name.exists() else content["model"]),
            random_weights=content["random_weights"],
            settings=source.manifest.job["settings"],
        )


def num_lists(rows: int, channels: int) -> int:
    """Number of clusters of a compressed index with this number of rows."""
    # faiss recommends 4 sqrt(N). Fewer if a cluster would get fewer than the 39 training vectors that faiss asks for.
    return max(1, min(int(4 * rows**0.5), min(rows, _most_sampled(channels)) // _MIN_SAMPLED))


def _most_sampled(channels: int) -> int:
    # faiss copies the sample, so half of a part's rows fit in the same memory.
    return max(1, _part_rows(channels) // 2)


def _part_rows(channels: int) -> int:
    return max(1, min(PART_ROWS, PART_BYTES // (4 * channels)))


def _trained(partial: Path, base: Path | None, manifest: IndexManifest, rows: Sequence[NewRows]) -> Path | None:
    """Train the clusters of a compressed index and return their file. An extension uses the existing file."""
    if manifest.kind == "exact":
        return None
    if base is not None:
        return base / TRAINED_FILE
    from esmeray.inference.index.compressed import train  # imported here, because it loads faiss

    path = partial / TRAINED_FILE
    count = sum(len(group.records) for group in rows)
    lists = num_lists(count, manifest.channels)
    recorded = path.with_suffix(".xxh128")
    if recorded.exists():
        check_file(path, f"remove {partial} and start again", xxh128=recorded.read_text())
    else:
        # The sample is spread evenly over all sources.
        share = min(1, min(_SAMPLED * lists, _most_sampled(manifest.channels)) / count)
        sample = []
        for group in rows:
            chosen = np.linspace(0, len(group.records) - 1, round(share * len(group.records)), dtype=np.int64)
            pieces = np.array_split(group.records[chosen], len(group.records) // _part_rows(manifest.channels) + 1)
            sample += [NewRows(group.source, records) for records in pieces]
        train(path, manifest.metric, _vectors(sample, manifest.metric), lists)
        write_atomically(recorded, file_xxh128(path))
    return path


def _grown(
    partial: Path,
    done: Journal,
    manifest: IndexManifest,
    rows: Sequence[NewRows],
    trained: Path | None,
    progress: Callable[[int], None],
) -> IndexManifest:
    """The manifest with the new parts. Parts that an earlier start wrote are verified; the others are written."""
    before = manifest.count
    pieces = [
        NewRows(group.source, group.records[start:stop])
        for group in rows
        for start, stop in ranges(len(group.records), _part_rows(manifest.channels))
    ]
    for piece, entry in zip_longest(pieces, [*map(PartEntry.model_validate_json, done.lines())]):
        if entry is not None:
            for name, checksum in entry.files.items():
                check_file(partial / name, f"remove {partial} and start again", xxh128=checksum)
        else:
            entry = _write_part(partial, manifest, piece, trained)
            done.add([entry.model_dump_json()])
        manifest = manifest.model_copy(update={"parts": [*manifest.parts, entry]})
        progress(manifest.count - before)
    return manifest


def _write_part(folder: Path, manifest: IndexManifest, piece: NewRows, trained: Path | None) -> PartEntry:
    """Write the files of the next part of an index."""
    vectors_nC = _vectors([piece], manifest.metric)
    name = f"parts/{len(manifest.parts):05d}"
    entry = PartEntry(rows=len(vectors_nC), name=name, continues=manifest.identity())
    path = entry.path(folder, ".safetensors")
    path.parent.mkdir(exist_ok=True)
    if trained is None:
        arrays = exact_arrays(manifest.metric, vectors_nC)
    else:
        from esmeray.inference.index.compressed import compressed_arrays, write_lists

        arrays = compressed_arrays(vectors_nC)
        write_lists(entry.path(folder, ".lists"), trained, vectors_nC, manifest.count)
    write_arrays(path, {**id_arrays(piece.ids_and_keys()), **arrays})
    for large in [] if trained is None else [path, entry.path(folder, ".lists")]:
        write_checksums(large)
    files = {str(path.relative_to(folder)): file_xxh128(path) for path in sorted(folder.glob(f"{name}.*"))}
    return entry.model_copy(update={"files": files})


def _vectors(groups: Sequence[NewRows], metric: MetricName) -> Values:
    """(n, C) prepared vectors of records. Raises DataError with the id of a vector that can't be compared."""
    vectors_nC = np.empty((sum(len(group.records) for group in groups), groups[0].source.channels), np.float32)
    filled = 0
    for group in groups:
        source = group.source
        for start, stop, chosen in group.blocks(_BLOCK):
            block_nC = source[start:stop]
            source.refuse(start, ~np.isfinite(block_nC).all(axis=1), "has NaN or infinity")
            source.refuse(start, *unusable(metric, block_nC))
            vectors_nC[filled : filled + len(chosen)] = prepared(metric, block_nC[chosen])
            filled += len(chosen)
        # Unmap .npy sources, because otherwise all vectors would be resident at the end.
        source.release()
    return vectors_nC


def new_rows(sources: Sequence[Embeddings], index: Index | None, folder: Path) -> Iterator[NewRows]:
    """Yield the records of each source whose ids the index and earlier sources lack.

    ``folder`` holds the temporary keys.

    Raises DataError for sources that can't be compared with the index, and for an id that occurs with different
    sequences, also within one source.
    """
    tables: list[Index | Embeddings] = [*sources] if index is None else [index, *sources]
    for source in sources:
        source.refuse_other_space(tables[0])
    # Rows of all tables are numbered consecutively.
    firsts = np.cumsum([0, *map(len, tables)]).tolist()
    keys = scratch_array(folder, [firsts[-1]], "S24")
    sequences_N2 = scratch_array(folder, [firsts[-1], 2], np.uint64)
    for first, table in zip(firsts, tables, strict=False):
        for start, ids, sequences_n2 in _blocks(table):
            rows = slice(first + start, first + start + len(ids))
            # The row comes last, so that among equal ids the earliest row sorts first.
            keys[rows] = [_digest(name) + row.to_bytes(8) for row, name in enumerate(ids, rows.start)]
            sequences_N2[rows] = sequences_n2
    keys.sort()
    for source, first in zip(sources, firsts[-1 - len(sources) :], strict=False):
        records = scratch_array(folder, [len(source)], np.min_scalar_type(len(source)))
        new = 0
        for start, ids, sequences_n2 in _blocks(source):
            earliest_n = keys[keys.searchsorted([*map(_digest, ids)])].view(">u8")[2::3].astype(np.int64)
            is_other_n = differ(sequences_N2[earliest_n], sequences_n2)
            if is_other_n.any():
                other = int(is_other_n.argmax())
                owner = tables[np.searchsorted(firsts, earliest_n[other], side="right") - 1]
                raise DataError(
                    f"{source.source}: {ids[other]!r} has a different sequence in {owner.source}; give it another id"
                )
            chosen = start + np.flatnonzero(earliest_n >= first)
            records[new : new + len(chosen)] = chosen
            new += len(chosen)
        yield NewRows(source, records[:new])


def _blocks(table: Index | Embeddings) -> Iterator[tuple[int, list[str], NDArray[np.uint64]]]:
    """Yield start, ids and sequence keys (n, 2) of each block of rows."""
    for start, stop in ranges(len(table), INDEX_ROWS):
        if isinstance(table, Index):
            yield start, table.ids(range(start, stop)), table.sequences(np.arange(start, stop))
        else:
            yield start, table.column("id", start, stop).to_pylist(), table.sequence_keys_of(start, stop)


def _digest(record_id: str) -> bytes:
    """BLAKE2b digest of 16 bytes. No BLAKE2b collision is known, while XXH3 collisions can be constructed."""
    return blake2b(record_id.encode(), digest_size=16).digest()
