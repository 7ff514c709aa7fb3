"""Files by URI (s3://, gs://, hf://, file://, what else fsspec opens): copies on this node's disk, and uploads.

A copy lies in ``CACHE/files/KEY``. The key is made of the URI and of what the store says of its objects, so that a
changed object is another copy; what is made of large local files may lie there, too (:func:`cached_folder`). The
processes of a node share copies; the least recently used ones are removed where the cache is full, but for those that a
living process uses. What is to be uploaded is made in ``CACHE/work``. Credentials and endpoints are never settings:
each store has its own way (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, HF_TOKEN ...).

A store of objects renames nothing, so an output at a URI changes by its manifest: new objects are uploaded first, the
manifest last, and then the objects that no manifest lists any more are removed (:func:`publish`). An output that is
replaced gets a folder of its own, ``version-XXXXXXXX``, to which ``esmeray-version.txt`` points; :func:`listing`
follows it.
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

from esmeray.common.errors import ConfigError, DataError, EsmerayError, ResourceError, expanded
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
from esmeray.common.text import first_line

log = logging.getLogger(__name__)

VARIABLE = "ESMERAY_STORAGE"
"""Environment variable by which this process's settings reach those that it starts, which read it once."""
AT_ONCE_S = 20.0
"""Patience with a store where somebody waits for something to start, in seconds."""
REPORTED_S, LONGEST_WAIT_S = 4.0, 30.0
"""A wait for a store that is as long as the first is reported."""
VERSION_FILE = "esmeray-version.txt"
"""Names the folder below a URI that holds the current version of an output that was replaced."""
_VERSION = re.compile(r"version-[0-9a-f]{8}/")
"""Prefix of a version's objects. Objects of versions that are not current do not belong to the output."""
_locks: dict[Path, Lock] = {}
"""Copies that this process uses: no process removes them while it lives."""

Returned = TypeVar("Returned")
Items = dict[str, dict[str, Any]]
"""Properties of objects, from the store (name, the path there; size in bytes; and more), by their names below a URI."""


@dataclass(frozen=True)
class Storage:
    """A process's settings of the section ``storage``."""

    cache_folder: str | None = None
    cache_gb: float = 100.0
    patience_s: float = 3600.0


def inherited() -> Storage:
    """Return the settings of the process that started this one."""
    return Storage(**json.loads(os.environ.get(VARIABLE, "{}")))


_storage = inherited()


def use(settings: Storage) -> None:
    """Follow these settings in this process and those that it starts."""
    global _storage
    _storage = settings
    os.environ[VARIABLE] = json.dumps(asdict(settings))


def storage() -> Storage:
    """Return the settings that this process follows."""
    return _storage


def uri_of(path: str | Path) -> str | None:
    """The URI that a setting means; None for a path. Pathlib makes s3:/bucket of s3://bucket, which is taken alike."""
    protocol, separator, rest = str(path).partition(":/")
    if not separator or re.fullmatch(r"[a-z][a-z0-9+.-]+", protocol) is None:
        return None
    rest = rest.strip("/")
    if ".." in rest.split("/") or ":" in rest.partition("@")[0].partition("/")[0]:
        # Without the rest: it would be in logs, and in the manifests of what is made.
        raise ConfigError(f"{protocol}://...: an address with a password or '..' in it; leave these out")
    return f"{protocol}://{'/' if protocol == 'file' else ''}{rest}"


def work_path(uri: str) -> Path:
    """Where on this node's disk that is made which a URI is to hold."""
    return _cache() / "work" / uri.replace("://", "/")


def local_path(source: str | Path, wanted: Callable[[str], bool] = lambda name: True) -> Path:
    """The path that a source is; of a URI, that of a copy of the file or folder as it is now, fetched if need be.

    ``wanted``: of the names in a folder. Raises DataError where nothing is there, ResourceError where it can't be had.
    """
    uri = uri_of(source)
    if uri is None:
        return expanded(source)
    items = {name: item for name, item in retried(lambda: listing(uri), uri).items() if wanted(name)}
    if not items:
        raise DataError(f"{uri}: nothing is there; check the address")
    size = sum(item["size"] for item in items.values())

    def fetch(building: Path) -> None:
        log.info("fetching %s, %.3g GB", uri, size / 1e9)
        retried(lambda: download(uri, items, building / Path(uri).name), uri)
        for path in building.rglob("*"):  # a store of sequences is known by the times of its sources
            os.utime(path, (0, 0))

    return cached_folder(uri, str(sorted(map(str, items.values()))), size, fetch) / Path(uri).name


def cached_folder(name: str, state: str, size: int, make: Callable[[Path], None]) -> Path:
    """A folder of the cache that ``make`` fills, with about ``size`` bytes, where there is none of this name and state.

    It stays while this process lives. Raises ResourceError where it has no place.
    """
    folder = _cache() / "files" / hashlib.sha256(f"{name} {state}".encode()).hexdigest()[:24]
    if folder not in _locks:
        _locks[folder] = take_lock(folder.with_suffix(".used"), shared=True)
    recover(folder)  # a kill after it got its name leaves a scratch folder
    if not folder.is_dir():
        with exclusive(folder):  # the processes of a node wait here for the one that makes it
            if not folder.is_dir():
                _make_room(folder.parent, name, size)
                with published(folder) as building:
                    make(building)
    os.utime(folder)  # last used: file systems are mostly mounted without times of access
    return folder


def _make_room(root: Path, uri: str, needed: int) -> None:
    room = _storage.cache_gb * 1e9 - needed
    # A user may have chosen a folder that holds more than copies: one has a key for its name and its lock beside it.
    copies = [path.with_suffix("") for path in root.glob("*.used") if re.fullmatch(r"[0-9a-f]{24}", path.stem)]
    folders = sorted((path for path in copies if path.is_dir()), key=lambda path: path.stat().st_mtime)
    sizes = {folder: sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) for folder in folders}
    for folder in folders:
        if sum(sizes.values()) > room:
            # Where a process uses it, it stays.
            with suppress(BlockingIOError), closing(take_lock(folder.with_suffix(".used"), 0)):
                shutil.rmtree(folder, ignore_errors=True)
                folder.with_suffix(".used").unlink()
                del sizes[folder]
    if sum(sizes.values()) > room:
        raise ResourceError(f"{uri}: {needed / 1e9:.3g} GB have no place in {root}: raise storage.cache_gb")


def listing(uri: str) -> Items:
    """The objects below a URI, or its own by the name ''; nothing where there is none.

    Of an output that was replaced the objects of its current version, by their names in it.
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
    files.invalidate_cache()  # fsspec keeps listings, and other nodes write
    with suppress(FileNotFoundError):
        items = files.find(root, detail=True).items()
        return {path.removeprefix(root).strip("/"): info or files.info(path) for path, info in items if path[-1] != "/"}
    return {}


def download(uri: str, items: Items, target: Path, *, afresh: bool = False) -> None:
    """Fetch objects to the file or folder ``target``; unless ``afresh`` those of which not as many bytes are there.

    Each appears complete under its name. Raises OSError where a part of one came.
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
                    raise OSError(f"{name or uri}: {size:,} of {item['size']:,} bytes came")

    with ThreadPoolExecutor(8) as pool:  # a store answers each request slowly, and many at once
        list(pool.map(fetch, items))


def read(uri: str) -> bytes:
    files, path = _opened(uri)
    return files.cat_file(path)


def open_ranges(uri: str, cache: str = "readahead") -> BinaryIO:
    """A file at a URI, of which what is read is fetched, and little more; ``cache`` is one of fsspec's.

    Raises OSError where there is no such file.
    """
    files, path = _opened(uri)
    # 64 KiB: fsspec reads ahead by 5 MB where nothing is said, which is more than most readers of a few rows want.
    file: BinaryIO = files.open(path, "rb", block_size=1 << 16, cache_type=cache)
    return file


def upload(path: Path, uri: str) -> None:
    files, target = _opened(uri)
    if "file" not in files.protocol:
        files.put_file(str(path), target)
        return
    # A store shows an object once it is whole; a folder would show the part that is copied.
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    # One name, which the same upload takes again after a kill.
    temporary = Path(target).with_name(f".{Path(target).name}.uploading")
    shutil.copyfile(path, temporary)
    temporary.replace(target)


def write(uri: str, text: str) -> None:
    with NamedTemporaryFile() as file:
        Path(file.name).write_text(text, encoding="utf-8")
        upload(Path(file.name), uri)


def upload_folder(folder: Path, uri: str, last: str, kept: Collection[str] = ()) -> None:
    """Copy a folder to a URI, the file ``last`` at the end: without it, what is there is not complete.

    ``kept``: names of files that are not copied.
    """
    # A reader of a first upload looks for other manifests than the last one, too: they come after what they list.
    for path in sorted(folder.rglob("*"), key=lambda path: (path == folder / last, path.suffix == ".json")):
        if path.is_file() and str(path.relative_to(folder)) not in kept:
            upload(path, f"{uri}/{path.relative_to(folder)}")


def remove(uri: str, last: str = "") -> None:
    """Remove an object, or all below a URI, where there is any; the object ``last`` after all others."""
    files, root = _opened(uri)
    if others := [item["name"] for name, item in _objects(uri).items() if last and name != last]:
        files.rm(others)
    files.invalidate_cache()
    with suppress(FileNotFoundError):
        files.rm(root, recursive=True)


def target_path(target: Path, overwrite: bool = False) -> Path:
    """Where to make a file or folder, resolved: of a URI a path on this node's disk, for :func:`publish`.

    A folder's .json files are fetched: by them what exists is recognised as it is on a disk. Raises ConfigError for
    what is none of Esmeray's, and for a file that exists and is not to be replaced.
    """
    if (uri := uri_of(target)) is None:
        return resolved(target)
    work = work_path(uri)
    items = retried(lambda: listing(uri), uri)
    leave(target)
    work.parent.mkdir(parents=True, exist_ok=True)
    # A file has its manifest beside it; a folder its own, or the record of work that is not finished.
    is_ours = bool(MADE_FILE in items or listing(_beside(uri) if "" in items else f"{uri}{PARTIAL}/{RECORD_FILE}"))
    if items and not (is_ours and (overwrite or "" not in items)):
        raise ConfigError(f"{uri}: exists and was {'' if is_ours else 'not '}made by Esmeray; choose another name")
    retried(lambda: _discard_finished(uri, items), uri)
    # Without its manifest a folder is the start of an upload that was cut short.
    settled = {name: item for name, item in items.items() if MADE_FILE in items and name.endswith(".json")}
    retried(lambda: download(uri, settled, work), uri)
    return work


def _discard_finished(uri: str, items: Items) -> None:
    """Remove the record of an upload that was killed after its manifest; unfinished work of other jobs stays."""
    record = f"{uri}{PARTIAL}/{RECORD_FILE}"
    if MADE_FILE in items and listing(record) and read(record) == read(f"{current(uri)}/{MADE_FILE}"):
        remove(f"{uri}{PARTIAL}", RECORD_FILE)


def publish(target: Path) -> None:
    """Replace what a URI holds by what :func:`target_path` was made for; waits for a store that is away.

    A reader sees the old output or the new one at every moment; see the module.
    """
    if (uri := uri_of(target)) is None:
        return
    work = work_path(uri)

    def replace() -> None:
        if work.is_file():
            upload(work_path(_beside(uri)), _beside(uri))  # first: a file without its manifest is nobody's to replace
            upload(work, uri)
        else:
            _publish_folder(work, uri)

    retried(replace, uri, _storage.patience_s, log.warning)
    leave(target)


def leave(target: Path) -> None:
    """Remove what :func:`target_path` has on this node's disk for a URI."""
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
        # The one file that changes is the output's own manifest. Until it is there, the one before it is right, too.
        made["replaced"] = {name: xxhash.xxh3_128_hexdigest(read(f"{current(uri)}/{name}")) for name in changed}
        write_atomically(work / MADE_FILE, json.dumps(made, indent=1) + "\n")
        upload_folder(work, current(uri), MADE_FILE, kept | changed)
        for name in changed:
            upload(work / name, f"{current(uri)}/{name}")
    # What others put there is in no manifest, and stays. A manifest goes after what it lists.
    ours = {item["name"] for name, item in before.items() if _VERSION.match(name)}
    ours |= {before[name]["name"] for name in _listed_objects(uri, before).keys() & before.keys()}
    ours -= {item["name"] for name, item in listing(uri).items() if name in {*new, MADE_FILE}}
    for path in sorted(ours, key=lambda path: path.endswith(MADE_FILE)):
        _opened(uri)[0].rm_file(path)
    remove(f"{uri}{PARTIAL}", RECORD_FILE)


def _listed_objects(uri: str, items: Items) -> dict[str, str]:
    """XXH3-128 of the objects that the manifests of an output list, "" of the manifests; "" if one may be older."""
    old: dict[str, str] = {}
    # The folder's own manifest and its parts' manifests.
    for name in [name for name in items if name == MADE_FILE or PurePath(name).match(f"{PARTS}/{MADE_FILE}")]:
        made = json.loads(_opened(uri)[0].cat_file(items[name]["name"]))
        root = name.removesuffix(MADE_FILE)
        old |= {root + file: checksum for file, checksum in made["files"].items()}
        old |= {root + file: "" for file in made.get("replaced", {})} | {name: ""}
    return old


def _beside(uri: str) -> str:
    folder, _, name = uri.rpartition("/")
    return f"{folder}/.{name}.{MADE_FILE}"


def retried(
    call: Callable[[], Returned],
    uri: str,
    patience_s: float = AT_ONCE_S,
    report: Callable[[str], None] = lambda line: None,
) -> Returned:
    """Call until it succeeds, after longer and longer waits; ``report`` gets a line where it takes long.

    Raises ResourceError where the patience ends, and at once where access is denied or the disk is full.
    """
    deadline_s, wait_s = time.monotonic() + patience_s, 0.25
    while True:
        try:
            return call()
        except EsmerayError:  # a refusal: it would be the same again
            raise
        except Exception as error:  # of whatever library the store has: fsspec has no errors of its own
            reason = f"{uri}: {first_line(error)}"
            if is_disk_full(error):
                raise disk_full(_cache(), reason) from error
            if isinstance(error, PermissionError) or time.monotonic() + wait_s > deadline_s:
                raise ResourceError(f"{reason}; check address, credentials and the store") from error
            if wait_s == REPORTED_S:
                report(f"{reason}; it is tried again for up to {patience_s:g} s")
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _cache() -> Path:
    folder = _storage.cache_folder
    return expanded(folder).absolute() if folder else cache_folder("storage")


def _opened(uri: str) -> tuple[Any, str]:
    """The file system of a URI, and the path there. Raises ConfigError where a package for it is missing."""
    import fsspec  # here: few need it
    from fsspec.registry import known_implementations

    protocol = uri.partition(":")[0]
    try:
        return fsspec.url_to_fs(uri, **({"auto_mkdir": True} if protocol == "file" else {}))
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        raise ConfigError(f"{uri}: needs the package {package}: pip install {package}") from error
    except ValueError as error:
        raise ConfigError(f"{uri}: no such kind of address ({first_line(error)}); give s3, gs, hf or file") from error
