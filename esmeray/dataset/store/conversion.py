"""FASTA, or the embedded sample, to a store: complete under its name, or not there at all.

In: names of files, the ingest policies, a target. Out: the folder that :class:`~esmeray.dataset.store.reader.Store`
reads.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from esmeray.common.errors import DataError
from esmeray.common.progress import ConversionProgress, ProgressCallback, conversion_bar, no_progress
from esmeray.common.publishing import exclusive, published, refuse_existing
from esmeray.common.remote import local_path
from esmeray.common.text import counted
from esmeray.dataset.fasta.counts import IngestCounts, SourceFile
from esmeray.dataset.fasta.locate import places_of_ids
from esmeray.dataset.fasta.reader import FastaSource, RecordBatch, find_files
from esmeray.dataset.fasta.records import Records
from esmeray.dataset.section import DataSection, IngestSection, SampleSection
from esmeray.dataset.store.format import DATA_FILE, FORMAT_VERSION, MANIFEST_FILE, SampleSource, StoreManifest
from esmeray.dataset.store.ingest import CleanBlock, Ingest
from esmeray.dataset.store.reader import Store
from esmeray.dataset.store.sample import GENERATOR_VERSION, sample_records
from esmeray.dataset.store.writer import StoreWriter
from esmeray.run_folder.job import REMEDY, other_job

SAMPLE = "sample"
_SAMPLE_BATCH_RECORDS = 512


class CheckedData(NamedTuple):
    """Content that a store of some files would have, and the changes that reading makes."""

    records: int
    residues: int
    counts: IngestCounts


def convert(
    sources: list[str],
    target: Path,
    ingest: IngestSection,
    *,
    progress: ProgressCallback = no_progress,
    overwrite: bool = False,
) -> StoreManifest:
    """Convert FASTA files, folders and globs to a store in the folder ``target``.

    Memory stays flat in the size of the files but for about 60 bytes a record (lengths, hashes, ids seen). Raises
    ConfigError where the target exists, DataError where a source or record is refused, ResourceError where the disk is
    full or can't be written.
    """
    target = absolute(target)
    refuse_existing(target, "store", overwrite, not_a_store)
    # Before the lock, which makes the target's folder and may have to be waited for.
    source = FastaSource(sources, ingest.max_residues)
    with exclusive(target):
        refuse_existing(target, "store", overwrite, not_a_store)  # another process may have made it meanwhile
        return _convert_locked(source, target, ingest, progress)


def check(sources: list[str], policies: IngestSection, *, progress: ProgressCallback = no_progress) -> CheckedData:
    """Read FASTA files as :func:`convert` does, and write nothing. Raises DataError where no record is left, too."""
    source = FastaSource(sources, policies.max_residues)
    ingest = Ingest(policies, partial(places_of_ids, source.paths), source.kernel)
    records = residues = 0
    for block in _blocks(source, ingest, progress):
        records += len(block.lengths)
        residues += len(block.residues)
    if not records:
        raise DataError(f"{', '.join(sources)}: no records are left after applying the policies")
    return CheckedData(records, residues, ingest.counts)


def ensure_store(data: DataSection, default_root: Path, progress: ProgressCallback = no_progress) -> Path:
    """The store of a run's data: a fitting one that exists, else one made now. Safe to call from several processes.

    A source that is itself a store is taken as it is. Otherwise the store is ``data.store``, or a folder in
    ``default_root`` named after the source's files and policies. A store that exists is verified in full. Raises
    DataError where the source can't be read or ``data.store`` is damaged or was made of something else, ResourceError
    where the disk is full or can't be written.
    """
    target = store_location(data, default_root)
    if source_store(data) is not None:
        if Store(target, verify="full").is_text:
            raise DataError(f"{target}: a store of texts, which classifiers alone can read; give proteins")
        return target
    with exclusive(target):
        if target.exists():
            made_with = Store(target, verify="full").manifest
            check_source(target, made_with.source, data, find_files)
            # Of the repairs alone: what only refuses records, as a bound on their length, leaves the same store.
            if made_with.ingest.repairs() != data.ingest.repairs():
                raise DataError(
                    f"{target}: made with other data.ingest settings ({made_with.ingest}); {other_store(target)}"
                )
        elif data.source == [SAMPLE]:
            _make_sample(data, target)
        else:
            _convert_locked(FastaSource(data.source, data.ingest.max_residues), target, data.ingest, progress)
    return target


def job_store(sources: list[str], ingest: IngestSection, folder: Path) -> Store:
    """The store that the sources are or, with a progress bar, are converted to in a folder, as :func:`ensure_store`.

    ``folder`` is that of an unfinished job. Raises ConfigError where its store has other sequences.
    """
    data = DataSection(source=sources, ingest=ingest)
    if source_store(data) is None:
        data = data.model_copy(update={"store": str(folder / "store")})
        # The job's other files are of these sequences: a store that was made anew of changed ones would not fit them.
        if (folder / "store" / MANIFEST_FILE).is_file():
            made_with = Store(folder / "store").manifest
            if not (made_with.ingest == ingest and _is_made_of(made_with.source, data, find_files)):
                raise other_job(folder, f"its input was {_described(made_with.source)}, as it was then", REMEDY)
    with conversion_bar("reading sequences") as progress:
        return Store(ensure_store(data, folder, progress))


def store_location(data: DataSection, default_root: Path) -> Path:
    """Path of the store of a run's data, made or not; see :func:`ensure_store`."""
    return location(data, source_store(data), lambda: default_root / _store_name(data))


def location(data: DataSection, source: Path | None, default: Callable[[], Path]) -> Path:
    """Path of the source if it is a store itself, of ``data.store``, or the default one, which its files name."""
    return absolute(source or (Path(data.store) if data.store else default()))


def _convert_locked(
    source: FastaSource, target: Path, policies: IngestSection, progress: ProgressCallback
) -> StoreManifest:
    ingest = Ingest(policies, partial(places_of_ids, source.paths), source.kernel)
    with published(target) as folder, closing(StoreWriter(folder, target)) as writer:
        for block in _blocks(source, ingest, progress):
            writer.add(block)
        return writer.finish(source.finished, policies, ingest.counts)


def _blocks(source: FastaSource, ingest: Ingest, progress: ProgressCallback) -> Iterator[CleanBlock]:
    """Blocks of a store, up to the first record that is refused; once all is read, a DataError of all refused ones."""
    ingest.counts.files_ignored = source.files_ignored
    source.counts = ingest.counts
    with ingest.faults.raised_at_end():
        for batch in source.batches():
            block = ingest.clean(batch)
            # After the first fault nothing is written any more, but all is read, to report every other one, too.
            if block is not None and not ingest.faults:
                yield block
            progress(ConversionProgress(source.bytes_read, source.bytes_total, ingest.counts.records_read))


def _make_sample(data: DataSection, target: Path) -> StoreManifest:
    ingest = Ingest(data.ingest)
    records = sample_records(data.sample.records, data.sample.families, data.sample.seed)
    with published(target) as folder, closing(StoreWriter(folder, target)) as writer:
        for block in filter(None, map(ingest.clean, sample_batches(records))):
            writer.add(block)
        return writer.finish(sample_source(data.sample), data.ingest, ingest.counts)


def sample_batches(records: Iterator[tuple[str, str]]) -> Iterator[RecordBatch]:
    """Ids and texts of an embedded sample as a FASTA file's reader would give them."""
    while batch := list(islice(records, _SAMPLE_BATCH_RECORDS)):
        ids, sequences = ([text.encode("ascii") for text in texts] for texts in zip(*batch, strict=True))
        yield RecordBatch(Records.of(ids, sequences))


def sample_source(sample: SampleSection) -> SampleSource:
    """The embedded sample as a manifest describes it."""
    return SampleSource(**sample.model_dump(), generator_version=GENERATOR_VERSION)


def absolute(path: Path) -> Path:
    """The path from the root, with links as they are."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolves '..' and '.', follows no link


def not_a_store(
    target: Path, kind: str, files: tuple[str, ...] = (MANIFEST_FILE, DATA_FILE), file_format: str = "esmeray-store"
) -> str | None:
    """The part of an existing target that is no store's, for :func:`~esmeray.common.publishing.refuse_existing`.

    ``files`` are those that a store of this kind may hold, its manifest first.
    """
    try:
        is_store = json.loads((target / files[0]).read_bytes())["format"] == file_format
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        is_store = False
    if not is_store:
        return f"is not a {kind}"
    # A store that somebody keeps other files beside is not removed with them.
    others = sorted({path.name for path in target.iterdir()} - set(files))
    return f"holds {others[0]}, which no {kind} does" if others else None


def source_store(data: DataSection, manifest_file: str = MANIFEST_FILE, kind: str = "store") -> Path | None:
    """The store that ``data.source`` names instead of files, if it does; ``kind`` is what messages call it.

    Raises DataError where it stands beside other sources, or ``data.store`` names another.
    """
    # Known by its manifest and not by a name: a folder of FASTA files may be called whatever.
    stores = [path for path in map(local_path, data.source) if (path / manifest_file).is_file()]
    if not stores:
        return None
    if len(data.source) > 1:
        raise DataError(f"{stores[0]}: a {kind} can't be joined with other sources; give it as the only source")
    if data.store is not None and absolute(Path(data.store)) != absolute(stores[0]):
        raise DataError(f"{stores[0]}: the source is a {kind} already; leave data.store out")
    return stores[0]


def _store_name(data: DataSection) -> str:
    described = [FORMAT_VERSION, data.ingest.repairs()]
    if data.source == [SAMPLE]:
        return name_of_content(SAMPLE, [*described, sample_source(data.sample).model_dump()])
    paths = find_files(data.source)
    return name_of_content(paths[0].name, [*described, file_identities(paths)])


def file_identities(paths: list[Path]) -> list[tuple[str, int, int, int]]:
    """Path, size, modification and change time of each file, which identify it without reading it.

    The change time differs for a file that was edited in place or replaced, whatever its modification time. Inodes are
    left out: some network file systems number them again for each mount.
    """
    return [
        (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ctime_ns) for path in paths
    ]


def name_of_content(first_name: str, described: list) -> str:
    """A readable name of what is made of a file of this name, another one for whatever else is described (as JSON)."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", first_name.split(".")[0]).strip("-") or "store"
    # What else is described is not in the name: paths and settings would make names of hundreds of letters.
    return f"{stem}-{hashlib.sha256(json.dumps(described).encode()).hexdigest()[:12]}"


def check_source(
    path: Path, made_of: list[SourceFile] | SampleSource, data: DataSection, find: Callable[[list[str]], list[Path]]
) -> None:
    """Raise DataError for a store of other files, or of another sample, than ``data.source`` names."""
    if not _is_made_of(made_of, data, find):
        raise DataError(
            f"{path}: made of {_described(made_of)}, not of {', '.join(data.source)} as it is; {other_store(path)}"
        )


def _is_made_of(
    made_of: list[SourceFile] | SampleSource, data: DataSection, find: Callable[[list[str]], list[Path]]
) -> bool:
    if data.source == [SAMPLE]:
        return made_of == sample_source(data.sample)
    return isinstance(made_of, list) and same_files(made_of, find(data.source))


def other_store(path: Path) -> str:
    """The remedy where a store does not fit the settings."""
    return f"choose another data.store, or read this one as it is with data.source {path}"


def same_files(recorded: list[SourceFile], paths: list[Path]) -> bool:
    """Compare files by what the system knows of them, and, if that differs, by content, a minute for 100 GB."""
    return len(recorded) == len(paths) and all(map(SourceFile.is_content_of, recorded, paths))


def _described(source: list[SourceFile] | SampleSource) -> str:
    if isinstance(source, SampleSource):
        families = counted(source.families, "famil{ies}")
        return f"the sample ({counted(source.records, 'record{s}')}, {families}, seed {source.seed})"
    more = f" and {counted(len(source) - 1, 'more file{s}')}" if len(source) > 1 else ""
    return f"{source[0].path}{more}"
