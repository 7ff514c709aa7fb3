"""Readers accept regular files only: no endless devices, and no pipes that wait for a writer."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from esmeray.common.errors import DataError, parsing, read_json, reading
from esmeray.dataset import table
from esmeray.dataset.table import Table, numbered_lines
from esmeray.train_config.loading import read_file


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))  # a socket address has at most 107 bytes


SPECIAL: list[Callable[[Path], None]] = [os.mkfifo, bind_socket, lambda path: path.symlink_to("/dev/zero")]


@pytest.mark.parametrize("make", SPECIAL)
def test_a_fifo_a_socket_or_a_device_is_refused_in_one_line(tmp_path: Path, make: Callable[[Path], None]):
    path = tmp_path / "a.json"
    make(path)
    for read in (
        lambda: read_json(path, "make it again"),
        lambda: reading(path).__enter__(),
        lambda: parsing(path, "make it again").__enter__(),
        lambda: [*numbered_lines(path)],
        lambda: Table(path, {"a": ""}).columns(),
        lambda: Table(path.with_name("link.parquet"), {"a": ""}).columns(),
    ):
        path.with_name("link.parquet").unlink(missing_ok=True)
        path.with_name("link.parquet").symlink_to(path)
        with pytest.raises(DataError, match="can't be read: a named pipe, socket or device, not a regular file"):
            read()


def test_pipes_folders_and_uris_are_left_to_whoever_opens_them(tmp_path: Path):
    ours, its = os.pipe()
    os.write(its, b"run: {name: a}")
    os.close(its)
    assert read_file(f"/dev/fd/{ours}")[0] == {"run": {"name": "a"}}
    os.close(ours)
    for path in (tmp_path, "s3://bucket/name", "a\0b"):
        with reading(path):
            pass


def test_a_line_without_end_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(table, "_LONGEST_TEXT", 1000)
    path = tmp_path / "a.tsv"
    with path.open("wb") as file:
        file.write(b"id\n")
        file.truncate(1 << 40)
    for read in (lambda: [*numbered_lines(path)], lambda: Table(path, {"id": ""}).columns()):
        with pytest.raises(DataError, match=r"a\.tsv: a line has 1,000 characters or more"):
            read()
