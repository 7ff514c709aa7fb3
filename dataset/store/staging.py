"""A store copied to a node's own disk before it is read, since LMDB must not be read over a network file system.

In: a store anywhere. Out: the path of a verified copy in a folder of this node, which all workers of the node share.
"""

import functools
import os
import shutil
from pathlib import Path

from common.errors import DataError
from common.publishing import disk_full, exclusive, published
from dataset.store.format import DATA_FILE, MANIFEST_FILE
from dataset.store.reader import Store


def stage_store(store_path: Path, stage_dir: Path) -> Path:
    """Copy a store to ``stage_dir``, unless a good copy is there, and verify the copy in full.

    The first process of a node copies, the others wait for it. A damaged copy is made again. Raises DataError where the
    store is damaged, ResourceError where the node's disk is full or can't be written.
    """
    store = Store(store_path)
    name = f"{store.path.name}-{store.manifest.data_xxh128[:16]}"
    target = Path(os.path.abspath(stage_dir)) / name  # noqa: PTH100
    with exclusive(target):
        if not _is_good(target):
            _copy(store, target)
    return target


@functools.cache
def stage_once(store_path: Path, stage_dir: Path) -> Path:
    """Call :func:`stage_store`, which reads the whole copy, once in a process: one that measures opens it often."""
    return stage_store(store_path, stage_dir)


def _is_good(target: Path) -> bool:
    if not target.exists():
        return False
    try:
        Store(target, verify="full")
    except DataError:
        return False  # made again from the original, which is verified in turn
    return True


def _copy(store: Store, target: Path) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < store.manifest.data_bytes:
        raise disk_full(target, f"staging takes {store.manifest.data_bytes / 1e9:.1f} GB")
    with published(target) as folder:
        for name in (DATA_FILE, MANIFEST_FILE):
            shutil.copyfile(store.path / name, folder / name)
        Store(folder, verify="full")
