"""Damage to files: flipped bits, and writers that are killed."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esmeray.common.errors import EsmerayError
from esmeray.run_folder.job import Journal


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """Flip one bit of a file while the block runs; restore it afterwards if the file still exists."""
    offset, mask = bit // 8, 1 << bit % 8
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
    try:
        yield
    finally:
        with suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
            file.seek(offset)
            file.write(bytes([byte]))


def flips(path: Path, count: int, seed: int) -> list[int]:
    """Random bit positions of a file; half of them are in the first 512 bytes, where headers are."""
    draw, size = random.Random(f"{seed} {path.name}"), path.stat().st_size
    return [8 * draw.randrange(min(size, 512) if number % 2 else size) + draw.randrange(8) for number in range(count)]


def refuse_silence(path: Path, read: Callable[[], Any], count: int = 30, seed: int = 0) -> int:
    """Flip one bit at a time and read the file; return how many flips raised a one-line error.

    All other flips must leave the result equal. Any other exception fails the test.
    """
    intact, noticed = copy.deepcopy(read()), 0  # arrays may be views of the file
    for bit in flips(path, count, seed):
        with flipped(path, bit):
            try:
                result = read()
            except EsmerayError as error:
                assert "\n" not in str(error) and str(path.parent) in str(error), f"bit {bit} of {path.name}: {error}"
                noticed += 1
            else:
                assert same(result, intact), f"bit {bit} of {path.name} changed the result in silence"
    return noticed


@contextmanager
def killed_in_piece(number: int) -> Iterator[None]:
    """Interrupt the block while a journal writes piece ``number``, after half of a line."""
    add = Journal.add

    def cut_short(journal: Journal, lines: Any) -> None:
        if journal.done + 1 < number:
            add(journal, lines)
            return
        journal._file.write(b"0.5 0.5")
        journal._file.flush()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "add", cut_short)
        yield


def same(first: Any, second: Any) -> bool:
    """Test for equality of arrays and of nested containers of arrays."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second, equal_nan=first.dtype.kind == "f")
    return bool(first == second)
