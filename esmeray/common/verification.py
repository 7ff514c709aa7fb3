"""Read back what Esmeray wrote: the bytes that were written, or a refusal in one line.

A file is compared with its checksum when a process first reads it, whole, and not again while it is the same file.
``check_file`` has the checksum from whoever keeps it (a store's manifest, a shard's row); ``verified`` finds it in the
manifest that every tool leaves with what it makes (:mod:`esmeray.common.publishing`). Files without one are read as
they are: those of others, and those that were taken out of their folder.
"""

import time
from functools import lru_cache
from pathlib import Path

from esmeray.common.errors import DataError, parsing, read_json, reading
from esmeray.common.publishing import MADE_FILE, file_xxh128

_DEPTH = 3
"""Folders up to the one with the manifest: a file of an output of one of several models (``OUT/model/residues``)."""
_SETTLED_S = 1.0
"""A file that was written since this may be written again without another time of change: the system's clock of files
is coarse (Linux 10 ms, some network file systems a second)."""

_verified: dict[Path, tuple[str | None, int, int, int, int]] = {}


def check_file(path: Path, remedy: str, *, num_bytes: int | None = None, xxh128: str | None = None) -> None:
    """Raise DataError, with the remedy, for a file of another size or checksum, or that can't be read."""
    with reading(path, remedy):
        status = path.stat()
        if num_bytes is not None and num_bytes != status.st_size:
            raise DataError(
                f"{path}: {status.st_size:,} bytes where the manifest says {num_bytes:,}: truncated or replaced; "
                f"{remedy}"
            )
        identity = (xxh128, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if xxh128 is None or _verified.get(path) == identity:
            return
        if xxh128 != file_xxh128(path):  # last, since it reads the whole file
            raise DataError(f"{path}: damaged: its checksum is not the manifest's; {remedy}")
    if time.time() - status.st_mtime > _SETTLED_S:
        _verified[path] = identity


def verified(path: Path) -> Path:
    """The path of a file whose bytes are those that its folder's manifest lists; see the module for files without one.

    Raises DataError where they are others, or the manifest is damaged.
    """
    whole = path.absolute()  # not resolved: a link in the folder is listed by its own name
    for folder in whole.parents[:_DEPTH]:
        manifest = folder / MADE_FILE
        if not manifest.is_file() or whole == manifest:
            continue
        remedy = f"make or copy {folder} again; if you changed it yourself, remove its {MADE_FILE}"
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
    """XXH3-128 by name, and those before of files that may not be replaced yet.

    Read once while the manifest is the same, since it may list thousands of shards.
    """
    remedy = f"make or copy {manifest.parent} again, or remove this file, by which the others are verified"
    made = read_json(manifest, remedy)
    with parsing(manifest, remedy):
        files = {str(name): str(checksum) for name, checksum in made["files"].items()}
        return files, dict(made.get("replaced", {}))
