"""Open an index from a folder or URI."""

from pathlib import Path

from esmeray.common.errors import ConfigError
from esmeray.common.remote import local_path, uri_of
from esmeray.inference.index.exact import ExactIndex, kinds
from esmeray.inference.index.index import Index
from esmeray.inference.index.parts import open_part, read_index_manifest


def open_index(path: Path | str, probes: int | None = None, parts: slice = slice(None)) -> Index:
    """Open the index in a folder, or at a URI, which is downloaded.

    ``probes``: number of clusters that a compressed index searches per query. ``parts``: parts to open; rows keep their
    numbers. Raises DataError for a missing or damaged index; ConfigError for probes with an exact index.
    """
    folder = local_path(path)
    whole = read_index_manifest(folder, uri_of(path))
    first_row = sum(part.rows for part in whole.parts[: parts.start or 0])
    manifest = whole.model_copy(update={"parts": whole.parts[parts]})
    if manifest.kind == "exact":
        if probes is not None:
            raise ConfigError(f"{path}: is an exact index without clusters to probe; remove search.probes")
        opened = [open_part(folder, part, kinds(manifest, part), by_blocks=False) for part in manifest.parts]
        index: Index = ExactIndex(folder, manifest, opened, first_row)
    else:
        from esmeray.inference.index.compressed import CompressedIndex  # imported here, because it loads faiss

        index = CompressedIndex(folder, manifest, whole.count, first_row, probes)
    index.source = uri_of(path) or folder
    return index
