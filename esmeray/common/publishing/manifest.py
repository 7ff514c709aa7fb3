"""Manifest of a tool's output: ``esmeray.json`` in a folder, ``.NAME.esmeray.json`` next to a file.

It lists the tool and the XXH3-128 of each file. Manifests may be untrusted, so the file names in them are checked.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import xxhash

from esmeray.common.errors import DataError, refuse_special, shortened

MADE_FILE = "esmeray.json"
PARTS = "part-*"
"""Subfolders that are added to a growing folder, each with its own manifest; existing files are not rewritten."""
_MAX_NAME_LENGTH, _MAX_PATH_LENGTH = 255, 2000
"""Maximum length of a name in bytes, and of a path below a folder in characters."""


def list_files(folder: Path, made_by: str) -> None:
    """Write the manifest of a folder, with the checksums of all its files."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MADE_FILE)
    checksums = {str(path.relative_to(folder)): file_xxh128(path) for path in paths}
    write_manifest(manifest_of(folder), made_by, checksums)


def listed_names(folder: Path, made_by: str) -> set[str]:
    """Return the names of the files that the manifest of a folder lists, and its own."""
    return {*listed(folder / MADE_FILE, made_by), MADE_FILE}


def listed(manifest: Path, made_by: str) -> dict[str, str]:
    """Return the XXH3-128 by file name; empty if another tool wrote the manifest."""
    try:
        refuse_special(manifest)
        made = json.loads(manifest.read_text(encoding="utf-8"))
        files = dict(made["files"]) if made["made_by"] == made_by else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        files = {}  # with a damaged manifest the output counts as another tool's, and is not replaced
    check_names(files, manifest)
    return files


def manifest_of(target: Path) -> Path:
    return target / MADE_FILE if target.is_dir() else target.with_name(f".{target.name}.{MADE_FILE}")


def write_manifest(path: Path, made_by: str, files: dict[str, str]) -> None:
    path.write_text(json.dumps({"made_by": made_by, "files": files}, indent=1) + "\n", encoding="utf-8")


def not_made_by(target: Path, made_by: str, read: bool = True) -> str | None:
    """Reason why a target is not an unchanged output of the tool, or None. ``read``: compare checksums, too."""
    manifest = manifest_of(target)
    files = listed(manifest, made_by)
    if not files:
        return f"was not written by {made_by}"
    folder = target if target.is_dir() else target.parent
    manifests = {manifest}
    # Only manifests of parts: other outputs inside this folder must not be replaced with it.
    for path in target.rglob(f"{PARTS}/{MADE_FILE}"):
        checksums = listed(path, made_by)
        part = path.parent.relative_to(folder)
        files |= {str(part / name): checksum for name, checksum in checksums.items()}
        if checksums:
            manifests.add(path)
    paths = [path for path in target.rglob("*") if path not in manifests] if target.is_dir() else [target]
    for path in paths:
        name = str(path.relative_to(folder))
        if path.is_symlink() or not (path.is_dir() or name in files):
            return f"contains {name}, which {made_by} did not write"
        if read and path.is_file() and file_xxh128(path) != files[name]:
            return f"{name} has changed since {made_by} wrote it"
    return None


def check_names(names: Iterable[object], manifest: Path | str) -> None:
    """Raise DataError if a manifest lists a name that can't be in its folder; see :func:`inner_name`."""
    try:
        list(map(inner_name, names))
    except ValueError as error:
        raise DataError(f"{manifest}: {error}; it was not written by Esmeray") from error


def inner_name(name: object) -> str:
    """Return a file name of a manifest; ValueError if it is absolute, empty, too long or contains ``..``.

    Manifests may be untrusted, and the files that they list are read, replaced and removed.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) and "\0" not in name else ()
    is_long = any(len(os.fsencode(part)) > _MAX_NAME_LENGTH for part in parts) or len(str(name)) > _MAX_PATH_LENGTH
    if not parts or parts[0].startswith("/") or ".." in parts or is_long:
        raise ValueError(f"{shortened(repr(name), _MAX_NAME_LENGTH)} is not the name of a file in its folder")
    return str(name)


def file_xxh128(path: Path) -> str:
    """XXH3-128 of a file's bytes, hex: detects damage like SHA-256 at ten times its speed; no signature."""
    refuse_special(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
