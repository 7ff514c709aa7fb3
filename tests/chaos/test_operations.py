"""Commands that are killed at a file operation lose nothing, and the harness notices a command that does."""

import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.chaos import operations
from tests.chaos.cases import CASES, Case, read_text


def write_old() -> None:
    Path("out").mkdir()
    Path("out/values.txt").write_text("old\n")


def publish_badly() -> None:
    """Replace a folder in steps: a kill in between loses it, and the folder `building` makes the next start fail."""
    shutil.rmtree("out")
    Path("building").mkdir()
    Path("building/values.txt").write_text("new\n")
    Path("building").rename("out")


BAD = Case((write_old,), publish_badly, partial(read_text, "out/values.txt"))


pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def results() -> tuple[list[str], list[str]]:
    """A table row for each of three commands, disturbed at a few points, and the list of problems."""
    return operations.preloaded(__name__, only=["data convert, replaced", "align, replaced", "bad"], most=4)


@pytest.mark.parametrize("name", ["data convert, replaced", "align, replaced"])
def test_a_command_killed_at_an_operation_loses_nothing_and_is_resumed(results, name):
    lines, wrong = results
    assert not [line for line in wrong if line.startswith(name)]
    (row,) = [line.split(" | ") for line in lines if line.startswith(f"| {name} | ")]
    assert int(row[1]) > 10, "operations"
    assert int(row[2]) + int(row[3]) == 4, "kills and errors"


def test_a_folder_replaced_in_steps_is_noticed_as_lost(results):
    wrong = [line for line in results[1] if line.startswith("bad, ")]
    assert any("lost: " in line and "not resumed: " in line for line in wrong)


if __name__ == "__main__":
    CASES["bad"] = BAD
    operations.main(*sys.argv[1:])
