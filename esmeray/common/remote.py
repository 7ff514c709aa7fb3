"""Files by URI (s3://, gs://, hf://, file://, what else fsspec opens): copies on this node's disk, and uploads.

Copies are kept in ``CACHE/files/KEY``. The key is a hash of the URI and of the objects' properties in the store, so a
changed object gets a new copy. Data derived from large local files can be cached there as well
(:func:`cached_folder`). The processes of a node share copies. If the cache is full, the least recently used copies are
removed, except for copies that a living process uses. Outputs are built in ``CACHE/work`` and then uploaded.
Credentials and endpoints are never settings: each store has its own environment variables (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, HF_TOKEN ...).

Object stores can't rename, so an output at a URI changes with its manifest: new objects are uploaded first, the
manifest last, and then the objects that no manifest lists are removed (:func:`publish`). A replaced output gets a new
folder ``version-XXXXXXXX``, and ``esmeray-version.txt`` names the current one; :func:`listing` follows it.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, TypeVar

import xxhash

from esmeray.common.errors import ConfigError, DataError, EsmerayError, ResourceError, expanded, first_line
from esmeray.common.own_folders import cache_folder
from esmeray.common.publishing import (
    MADE_FILE,
    PARTIAL,
    PARTS,
    RECORD_FILE,
    Lock,
    atomic_file,
    check_names,
    disk_full,
    exclusive,
    inner_name,
    is_disk_full,
    published,
    recover,
    resolved,
    take_lock,
    write_atomically,
)

log = logging.getLogger(__name__)

VARIABLE = "ESMERAY_STORAGE"
"""Environment variable with this process's settings, which its child processes inherit."""
AT_ONCE_S = 20.0
"""How long to retry, in seconds, if a user waits for a command to start."""
REPORTED_S, MAX_WAIT_S = 4.0, 30.0
"""Waits between retries, in seconds: the wait that is reported, and the longest."""
VERSION_FILE = "esmeray-version.txt"
"""File that names the folder of the current version of a replaced output."""
_VERSION = re.compile(r"version-[0-9a-f]{8}/")
"""Prefix of a version's objects. Objects of versions that are not current do not belong to the output."""
_locks: dict[Path, Lock] = {}
"""Locks of the copies that this process uses. Other processes keep locked copies."""

Returned = TypeVar("Returned")
Items = dict[str, dict[str, Any]]
"""Properties of objects (name: path in the store; size in bytes; and more), by their names relative to a URI."""


@dataclass(frozen=True)
class Storage:
    """Settings of the section ``storage``, as a process uses them."""

    cache_folder: str | None = None
    cache_gb: float = 100.0
    patience_s: float = 3600.0


def use(settings: Storage) -> None:
    """Apply settings to this process and its child processes."""
    os.environ[VARIABLE] = json.dumps(asdict(settings))


def storage() -> Storage:
    """Return this process's settings, which may come from the process that started it."""
    return Storage(**json.loads(os.environ.get(VARIABLE, "{}")))


def uri_of(path: str | Path) -> str | None:
    """Return the URI of a source, or None for a path. s3:/bucket is accepted, because pathlib makes it of s3://bucket."""
    protocol, separator, rest = str(path).partition(":/")
    if not separator or re.fullmatch(r"[a-z][a-z0-9+.-]+", protocol) is None:
        return None
    rest = rest.strip("/")
    if ".." in rest.split("/") or ":" in rest.partition("@")[0].partition("/")[0]:
        # The message leaves out the rest: a password must not get into logs and manifests.
        raise ConfigError(f"{protocol}://...: the address contains a password or '..'; remove it")
    return f"{protocol}://{'/' if protocol == 'file' else ''}{rest}"


def work_path(uri: str) -> Path:
    """Return the local path where the output for a URI is built."""
    return _cache() / "work" / uri.replace("://", "/")


def local_path(source: str | Path, wanted: Callable[[str], bool] = lambda name: True) -> Path:
    """Return the path of a source. For a URI, this is an up-to-date copy on this node, fetched if necessary.

    ``wanted``: filter for the names in a folder. Raises DataError if nothing is there, or ResourceError if it can't be
    fetched.
    """
    uri = uri_of(source)
    if uri is None:
        return expanded(source)
    items = {name: item for name, item in retried(lambda: listing(uri), uri).items() if wanted(name)}
    if not items:
        raise DataError(f"{uri}: not found; check the address")
    size = sum(item["size"] for item in items.values())

    def fetch(building: Path) -> None:
        log.info("fetching %s, %.3g GB", uri, size / 1e9)
        retried(lambda: download(uri, items, building / Path(uri).name), uri)
        for path in building.rglob("*"):  # a sequence store identifies its sources by their times
            os.utime(path, (0, 0))

    return cached_folder(uri, str(sorted(map(str, items.values()))), size, fetch) / Path(uri).name


def cached_folder(name: str, state: str, size: int, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache. If there is none of this name and state, ``make`` fills it (about ``size`` bytes).

    It is kept while this process lives. Raises ResourceError if the cache has no room for it.
    """
    folder = _cache() / "files" / hashlib.sha256(f"{name} {state}".encode()).hexdigest()[:24]
    if folder not in _locks:
        _locks[folder] = take_lock(folder.with_suffix(".used"), shared=True)
    recover(folder)  # a kill after it got its name leaves a scratch folder
    if not folder.is_dir():
        with exclusive(folder):  # other processes of the node wait here while one makes it
            if not folder.is_dir():
                _make_room(folder.parent, name, size)
                with published(folder) as building:
                    make(building)
    os.utime(folder)  # marks the last use: most file systems are mounted without access times
    return folder


def _make_room(root: Path, uri: str, needed: int) -> None:
    room = storage().cache_gb * 1e9 - needed
    # The user's folder may hold other files. A copy is named by a key and has a lock file next to it.
    copies = [path.with_suffix("") for path in root.glob("*.used") if re.fullmatch(r"[0-9a-f]{24}", path.stem)]
    folders = sorted((path for path in copies if path.is_dir()), key=lambda path: path.stat().st_mtime)
    sizes = {}
    for folder in folders:
        sizes[folder] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    for folder in folders:
        if sum(sizes.values()) > room:
            # Copies in use stay.
            with suppress(BlockingIOError), closing(take_lock(folder.with_suffix(".used"), 0)):
                shutil.rmtree(folder, ignore_errors=True)
                folder.with_suffix(".used").unlink()
                del sizes[folder]
    if sum(sizes.values()) > room:
        raise ResourceError(f"{uri}: {needed / 1e9:.3g} GB do not fit into the cache {root}: raise storage.cache_gb")


def listing(uri: str) -> Items:
    """Return the objects below a URI (the name '' is an object at the URI itself); empty if there are none.

    For a replaced output, these are the objects of its current version, by their names in that version.
    """
    items = _objects(uri)
    prefix = f"{_version(uri)}/" if VERSION_FILE in items else ""
    names = {name.removeprefix(prefix): name for name in items if name.startswith(prefix)}
    return {name: items[whole] for name, whole in names.items() if not _VERSION.match(name)}


def current(uri: str) -> str:
    """Return the URI of the current version of an output, which is its own unless it was replaced."""
    return f"{uri}/{_version(uri)}" if listing(f"{uri}/{VERSION_FILE}") else uri


def _version(uri: str) -> str:
    return inner_name(read(f"{uri}/{VERSION_FILE}").decode().strip())


def _objects(uri: str) -> Items:
    files, root = _opened(uri)
    files.invalidate_cache()  # fsspec caches listings, and other nodes write
    with suppress(FileNotFoundError):
        items = files.find(root, detail=True).items()
        return {path.removeprefix(root).strip("/"): info or files.info(path) for path, info in items if path[-1] != "/"}
    return {}


def download(uri: str, items: Items, target: Path, *, afresh: bool = False) -> None:
    """Fetch objects to the file or folder ``target``. Files of the right size are skipped, unless ``afresh``.

    Each file appears under its name once it is complete. Raises OSError if an object arrives incomplete.
    """
    files, _ = _opened(uri)
    check_names(filter(None, items), uri)

    def fetch(name: str) -> None:
        path, item = target / name if name else target, items[name]
        if afresh or not (path.exists() and path.stat().st_size == item["size"]):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path) as temporary:
                files.get_file(item["name"], str(temporary))
                if (size := temporary.stat().st_size) != item["size"]:
                    raise OSError(f"{name or uri}: received {size:,} of {item['size']:,} bytes")

    with ThreadPoolExecutor(8) as pool:  # stores answer slowly, but many requests at once
        list(pool.map(fetch, items))


def read(uri: str) -> bytes:
    files, path = _opened(uri)
    return files.cat_file(path)


def open_ranges(uri: str, cache: str = "readahead") -> BinaryIO:
    """Open a file at a URI and fetch little more than the ranges that are read. ``cache``: name of an fsspec cache.

    Raises OSError if the file does not exist.
    """
    files, path = _opened(uri)
    # 64 KiB, because fsspec reads 5 MB ahead by default, far more than readers of a few rows need.
    file: BinaryIO = files.open(path, "rb", block_size=1 << 16, cache_type=cache)
    return file


def upload(path: Path, uri: str) -> None:
    files, target = _opened(uri)
    if "file" not in files.protocol:
        files.put_file(str(path), target)
        return
    # Stores show only complete objects; a folder would show a file while it is copied.
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    # A fixed name, so that the same upload overwrites it after a kill.
    temporary = Path(target).with_name(f".{Path(target).name}.uploading")
    shutil.copyfile(path, temporary)
    temporary.replace(target)


def write(uri: str, text: str) -> None:
    with NamedTemporaryFile() as file:
        Path(file.name).write_text(text, encoding="utf-8")
        upload(Path(file.name), uri)


def upload_folder(folder: Path, uri: str, last: str, kept: Collection[str] = ()) -> None:
    """Copy a folder to a URI, with the file ``last`` at the end: it marks the upload as complete.

    ``kept``: names of files that are not copied.
    """
    # Readers of a first upload also look for other manifests, so these are uploaded after the files that they list.
    for path in sorted(folder.rglob("*"), key=lambda path: (path == folder / last, path.suffix == ".json")):
        if path.is_file() and str(path.relative_to(folder)) not in kept:
            upload(path, f"{uri}/{path.relative_to(folder)}")


def remove(uri: str, last: str = "") -> None:
    """Remove an object, or all objects below a URI, if there are any; the object ``last`` after the others."""
    files, root = _opened(uri)
    if others := [item["name"] for name, item in _objects(uri).items() if last and name != last]:
        files.rm(others)
    files.invalidate_cache()
    with suppress(FileNotFoundError):
        files.rm(root, recursive=True)


def target_path(target: Path, overwrite: bool = False) -> Path:
    """Return the resolved path to build an output at. For a URI, it is on this node's disk, for :func:`publish`.

    A folder's .json files are fetched, so that an existing output is recognized as on a disk. Raises ConfigError if
    the target was not made by Esmeray, or is a file that exists and ``overwrite`` is not set.
    """
    if (uri := uri_of(target)) is None:
        return resolved(target)
    work = work_path(uri)
    items = retried(lambda: listing(uri), uri)
    discard_work(target)
    work.parent.mkdir(parents=True, exist_ok=True)
    # A file's manifest is next to it. A folder contains its manifest, or has a record of unfinished work.
    evidence = _manifest_uri(uri) if "" in items else f"{uri}{PARTIAL}/{RECORD_FILE}"
    is_ours = bool(MADE_FILE in items or listing(evidence))
    if items and not (is_ours and (overwrite or "" not in items)):
        raise ConfigError(
            f"{uri}: already exists and was {'' if is_ours else 'not '}written by Esmeray; choose another name"
        )
    retried(lambda: _discard_finished(uri, items), uri)
    # A folder without its manifest is an incomplete upload.
    settled = {name: item for name, item in items.items() if MADE_FILE in items and name.endswith(".json")}
    retried(lambda: download(uri, settled, work), uri)
    return work


def _discard_finished(uri: str, items: Items) -> None:
    """Remove the record, or its empty folder, of an upload that was killed after its manifest; other work stays."""
    partial = f"{uri}{PARTIAL}"
    left = listing(partial)
    if MADE_FILE in items and (
        not left or (RECORD_FILE in left and read(f"{partial}/{RECORD_FILE}") == read(f"{current(uri)}/{MADE_FILE}"))
    ):
        remove(partial, RECORD_FILE)


def publish(target: Path) -> None:
    """Upload the output built at :func:`target_path`, replacing the old one. Waits if the store can't be reached.

    Readers see the old output or the new one at every moment; see the module's docstring.
    """
    if (uri := uri_of(target)) is None:
        return
    work = work_path(uri)

    def replace() -> None:
        if work.is_file():
            # First, because a file without its manifest can't be replaced.
            upload(work_path(_manifest_uri(uri)), _manifest_uri(uri))
            upload(work, uri)
        else:
            _publish_folder(work, uri)

    retried(replace, uri, storage().patience_s, log.warning)
    discard_work(target)


def discard_work(target: Path) -> None:
    """Remove the local path that :func:`target_path` returned for a URI."""
    if (uri := uri_of(target)) is not None:
        shutil.rmtree(work_path(uri), ignore_errors=True)
        with suppress(OSError):
            work_path(uri).unlink()


def _publish_folder(work: Path, uri: str) -> None:
    made = json.loads((work / MADE_FILE).read_text(encoding="utf-8"))
    new = made["files"]
    before = _objects(uri)
    items = listing(uri)
    old = _listed_objects(uri, items)
    kept = {name for name in new.keys() & items.keys() if old.get(name) == new[name]}
    changed = (new.keys() & old.keys()) - kept
    if MADE_FILE not in items:
        # The same command resumes a killed upload by this copy of the manifest, or recognizes a finished one.
        upload(work / MADE_FILE, f"{uri}{PARTIAL}/{RECORD_FILE}")
        upload_folder(work, uri, MADE_FILE)
    elif len(changed) > 1:
        version = f"version-{uuid.uuid4().hex[:8]}"
        upload_folder(work, f"{uri}/{version}", MADE_FILE)
        write(f"{uri}/{VERSION_FILE}", version)
    else:
        # Only the output's own manifest changes. The old one stays valid until it is replaced.
        made["replaced"] = {name: xxhash.xxh3_128_hexdigest(read(f"{current(uri)}/{name}")) for name in changed}
        write_atomically(work / MADE_FILE, json.dumps(made, indent=1) + "\n")
        upload_folder(work, current(uri), MADE_FILE, kept | changed)
        for name in changed:
            upload(work / name, f"{current(uri)}/{name}")
    # Objects of others are in no manifest, and stay. A manifest is removed after the objects it lists.
    ours = {item["name"] for name, item in before.items() if _VERSION.match(name)}
    ours |= {before[name]["name"] for name in _listed_objects(uri, before).keys() & before.keys()}
    ours -= {item["name"] for name, item in listing(uri).items() if name in {*new, MADE_FILE}}
    for path in sorted(ours, key=lambda path: path.endswith(MADE_FILE)):
        _opened(uri)[0].rm_file(path)
    remove(f"{uri}{PARTIAL}", RECORD_FILE)


def _listed_objects(uri: str, items: Items) -> dict[str, str]:
    """Return the XXH3-128 of each object that an output's manifests list; "" for manifests and objects in doubt."""
    old: dict[str, str] = {}
    # The folder's own manifest and its parts' manifests.
    for name in [name for name in items if name == MADE_FILE or PurePath(name).match(f"{PARTS}/{MADE_FILE}")]:
        made = json.loads(_opened(uri)[0].cat_file(items[name]["name"]))
        root = name.removesuffix(MADE_FILE)
        old |= {root + file: checksum for file, checksum in made["files"].items()}
        old |= {root + file: "" for file in made.get("replaced", {})} | {name: ""}
    return old


def _manifest_uri(uri: str) -> str:
    folder, _, name = uri.rpartition("/")
    return f"{folder}/.{name}.{MADE_FILE}"


def retried(
    call: Callable[[], Returned],
    uri: str,
    patience_s: float = AT_ONCE_S,
    report: Callable[[str], None] = lambda line: None,
) -> Returned:
    """Retry a call with growing waits until it succeeds; ``report`` gets a line if this takes long.

    Raises ResourceError after ``patience_s``, and immediately if access is denied or the disk is full.
    """
    deadline_s, wait_s = time.monotonic() + patience_s, 0.25
    while True:
        try:
            return call()
        except EsmerayError:  # a refusal, which a retry can't change
            raise
        except Exception as error:  # of any library: fsspec has no errors of its own
            reason = f"{uri}: {first_line(error)}"
            if is_disk_full(error):
                raise disk_full(_cache(), reason) from error
            if isinstance(error, PermissionError) or time.monotonic() + wait_s > deadline_s:
                raise ResourceError(f"{reason}; check the address, the credentials and the object store") from error
            if wait_s == REPORTED_S:
                report(f"{reason}; retrying for up to {patience_s:g} s")
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, MAX_WAIT_S)


def _cache() -> Path:
    folder = storage().cache_folder
    return expanded(folder).absolute() if folder else cache_folder("storage")


def _opened(uri: str) -> tuple[Any, str]:
    """Return the file system of a URI and the path in it. Raises ConfigError if a package for it is missing."""
    import fsspec  # imported here, because few commands need it
    from fsspec.registry import known_implementations

    protocol = uri.partition(":")[0]
    try:
        return fsspec.url_to_fs(uri, **({"auto_mkdir": True} if protocol == "file" else {}))
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        raise ConfigError(f"{uri}: the package {package} is not installed; run: pip install {package}") from error
    except ValueError as error:
        raise ConfigError(f"{uri}: unsupported protocol ({first_line(error)}); use s3, gs, hf or file") from error
