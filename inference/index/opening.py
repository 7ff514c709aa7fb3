"""From a folder, or a URI, to an index."""

from pathlib import Path

from esmeray.common.errors import ConfigError
from esmeray.common.remote import local_path
from esmeray.inference.index.exact import ExactIndex, shapes
from esmeray.inference.index.index import Index
from esmeray.inference.index.parts import open_part, read_index_manifest


def open_index(path: Path | str, probes: int | None = None) -> Index:
    """Open the index in a folder, or at a URI, of which a copy is fetched.

    ``probes``: clusters that a compressed index searches for a query. Raises DataError where none is there, or it is
    damaged; ConfigError for probes of an exact one.
    """
    folder = local_path(path)
    manifest = read_index_manifest(folder)
    if manifest.kind == "exact":
        if probes is not None:
            raise ConfigError(f"{path}: is an exact index, which has no clusters to probe; leave search.probes out")
        parts = [open_part(folder, part, shapes(manifest, part)) for part in manifest.parts]
        return ExactIndex(folder, manifest, parts)
    from esmeray.inference.index.compressed import CompressedIndex  # here: it loads faiss

    return CompressedIndex(folder, manifest, probes)
