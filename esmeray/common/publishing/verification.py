"""Verify the checksums of files that Esmeray wrote, before they are read.

A process compares a whole file with its checksum before the first read, and again only if the file changes.
``check_file`` gets the checksum from its caller (a store's manifest, a shard's row). ``verified`` finds it in the
manifest that every tool writes with its output. Files without a manifest are not verified.
"""

import time
from functools import lru_cache
from pathlib import Path

from esmeray.common.errors import DataError, parsing, read_json, reading
from esmeray.common.publishing.manifest import MADE_FILE, file_xxh128

_DEPTH = 3
"""Maximum number of parent folders that are searched for the manifest; outputs of several models need three
(``OUT/model/residues``)."""
_SETTLED_S = 1.0
"""Seconds since its last write after which a file's time identifies its content. File clocks are coarse (Linux 10 ms,
some network file systems 1 s), so a second write may leave the time as it is."""

_verified: dict[Path, tuple[str | None, int, int, int, int]] = {}


def check_file(path: Path, remedy: str, *, num_bytes: int | None = None, xxh128: str | None = None) -> None:
    """Raise DataError, with the remedy, for a file of another size or checksum, or that can't be read."""
    with reading(path, remedy):
        status = path.stat()
        if num_bytes is not None and num_bytes != status.st_size:
            raise DataError(
                f"{path}: {status.st_size:,} bytes, but the manifest says {num_bytes:,}: truncated or replaced; "
                f"{remedy}"
            )
        identity = (xxh128, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if xxh128 is None or _verified.get(path) == identity:
            return
        if xxh128 != file_xxh128(path):  # last, since it reads the whole file
            raise DataError(f"{path}: damaged: its checksum differs from the manifest; {remedy}")
    if time.time() - status.st_mtime > _SETTLED_S:
        _verified[path] = identity


def verified(path: Path) -> Path:
    """Return the path after comparing the file with its folder's manifest; a file without one is not verified.

    Raises DataError if the bytes differ, or the manifest is damaged.
    """
    whole = path.absolute()  # not resolved: a link in the folder is listed by its own name
    for folder in whole.parents[:_DEPTH]:
        manifest = folder / MADE_FILE
        if not manifest.is_file() or whole == manifest:
            continue
        remedy = f"build or copy {folder} again; if you changed it yourself, remove its {MADE_FILE}"
        status = manifest.stat()
        name = str(whole.relative_to(folder))
        files, replaced = _checksums(manifest, status.st_mtime_ns, status.st_size)
        if name in files:
            if name not in replaced or replaced[name] != file_xxh128(whole):
                check_file(whole, remedy, xxh128=files[name])
            break
    return path


@lru_cache(maxsize=64)
def _checksums(manifest: Path, _mtime_ns: int, _size: int) -> tuple[dict[str, str], dict[str, str]]:
    """XXH3-128 by file name, and the previous checksums of files that may not be replaced yet.

    Cached while the manifest is unchanged, since it may list thousands of shards.
    """
    remedy = f"build or copy {manifest.parent} again, or remove this file, which lists the checksums of the others"
    made = read_json(manifest, remedy)
    with parsing(manifest, remedy):
        files = {str(name): str(checksum) for name, checksum in made["files"].items()}
        return files, dict(made.get("replaced", {}))
