"""If the system refuses a write, every writer raises an error that names the file."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

from esmeray.common.errors import ResourceError
from esmeray.common.figure_style import picture
from esmeray.common.publishing import made_file, made_folder, write_atomically
from esmeray.dataset.embeddings.arrays import write_arrays
from esmeray.inference.index.compressed import train, write_lists
from esmeray.run_folder.job import accept, journal
from esmeray.run_folder.metrics_log import MetricsLog
from esmeray.run_folder.paths import Outcome, RunFolder
from esmeray.training.checkpoints.writer import _write_shard
from tests.embeddings import INSTALLED, make_embeddings, random_vectors

VECTORS = random_vectors(64, 8)


def with_log(folder: Path) -> Callable[[], Any]:
    log = MetricsLog(folder / "metrics.jsonl")
    return lambda: log.write("train", 1, loss=1.0)


def with_journal(folder: Path) -> Callable[[], Any]:
    def write() -> None:
        with journal(folder) as pieces:
            pieces.add(["a"])

    return write


def with_clusters(folder: Path) -> Callable[[], Any]:
    train(folder / "trained", "cosine", VECTORS, 1)
    return lambda: write_lists(folder / "lists", folder / "trained", VECTORS, 0)


def make_by(making: Any, fill: Callable[[Path], Any]) -> Callable[[Path], Callable[[], Any]]:
    def prepare(folder: Path) -> Callable[[], Any]:
        def write() -> None:
            with making(folder / "out", "test", False) as building:
                fill(building)

        return write

    return prepare


def draw(folder: Path) -> None:
    with picture(folder / "curves.png", 2, 2, "title"):
        pass


WRITERS: dict[str, Callable[[Path], Callable[[], Any]]] = {
    "metrics": with_log,
    "journal": with_journal,
    "lists": with_clusters,
    "folder": make_by(made_folder, lambda folder: (folder / "file").write_text("text")),
    "file": make_by(made_file, lambda path: path.write_text("text")),
    "tensors": make_by(made_folder, lambda folder: save_file({"a": VECTORS}, folder / "a.safetensors")),
    "tokenizer": make_by(made_folder, lambda folder: Tokenizer(BPE()).save(str(folder / "tokenizer.json"))),
    "picture": lambda folder: lambda: draw(folder),
    "text": lambda folder: lambda: write_atomically(folder / "config.yaml", "text"),
    "arrays": lambda folder: lambda: write_arrays(folder / "a.safetensors", {"a": VECTORS}),
    "clusters": lambda folder: lambda: train(folder / "trained", "cosine", VECTORS, 1),
    "job": lambda folder: lambda: accept(folder, {"a": 1}),
    "reserve": lambda folder: RunFolder(folder.parent, folder.name).clear_requests,
    "outcome": lambda folder: (
        lambda: RunFolder(folder.parent, folder.name).write_outcome(Outcome("finished", 1, "", 0))
    ),
    "shard": lambda folder: lambda: _write_shard(folder, "shard", b"bytes"),
    "pickled shard": lambda folder: lambda: _write_shard(folder, "shard", {"a": np.zeros(3)}),
    **{
        name: lambda folder, name=name: lambda: make_embeddings(folder / "v", VECTORS, file_format=name)
        for name in INSTALLED
        if name != "safetensors"
    },
}


@pytest.mark.parametrize("writer", WRITERS)
def test_an_error_of_writing_names_the_file(tmp_path: Path, full_disk, writer: str):
    write = WRITERS[writer](tmp_path)
    with pytest.raises((OSError, ResourceError)) as refused, full_disk(0):
        write()
    error = refused.value
    assert str(tmp_path) in str(error)
    assert isinstance(error, ResourceError) or error.errno == errno.EFBIG
