"""A damaged or hostile file is read or refused in one line, within a gigabyte and ten seconds."""

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from esmeray.common.errors import EsmerayError
from tests.fuzz.processes import fuzz
from tests.fuzz.readers import READERS, Reader


@pytest.mark.nightly
@pytest.mark.parametrize("name", READERS)
def test_a_mutated_file_gives_a_result_or_one_line(name: str):
    outcome = fuzz(name, inputs=20, seed=0)
    assert outcome.failures == {} and outcome.counts.total() == 20
    assert outcome.counts["refusal"]


@pytest.mark.parametrize("name", READERS)
def test_what_never_ends_in_place_of_a_file_is_refused_at_once(name: str, tmp_path: Path):
    if name == "esmeray.json":
        pytest.skip("refuse_existing reads it by itself")
    READERS[name].seeds(tmp_path)
    path = tmp_path / READERS[name].file
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        path.unlink(missing_ok=True)
        make(path)
        begun = time.monotonic()
        with suppress(EsmerayError):  # some are read as names of missing files
            READERS[name].read(path)
        assert time.monotonic() - begun < 5


def test_the_fuzz_notices_tracebacks_crashes_and_memory(monkeypatch):
    def harm(path):
        content = path.read_bytes()
        if content == b"traceback":
            raise KeyError("x")
        if content == b"memory":
            return bytearray(2 << 30)
        return None if content == b"fine" else __import__("os").abort()

    monkeypatch.setitem(READERS, "harm", Reader("in", lambda _: [], harm))
    contents = [b"fine", b"traceback", b"fine", b"memory", b"crash", b"fine"]
    monkeypatch.setattr("tests.fuzz.processes.input_of", lambda name, seeds, seed, number: contents[number])
    outcome = fuzz("harm", inputs=6, seed=0)
    assert (outcome.counts, outcome.inputs) == ({"result": 3}, 6)
    assert [text.split(":")[0] for text in outcome.failures.values()] == [
        "KeyError",
        "MemoryError",
        "the process ended with -6",
    ]
