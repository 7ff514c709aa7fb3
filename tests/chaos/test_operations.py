"""Commands that are killed at their file operations lose nothing, and the harness notices one that does."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.chaos import operations


def write_old() -> None:
    Path("out").mkdir()
    Path("out/values.txt").write_text("old\n")


def publish_badly() -> None:
    """Replace a folder in steps: a kill between them loses it, and what lies beside is in the way of the next."""
    shutil.rmtree("out")
    Path("building").mkdir()
    Path("building/values.txt").write_text("new\n")
    Path("building").rename("out")


BAD = operations.Case((write_old,), publish_badly, operations.printed("out/values.txt"))


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A row for each of three commands, each at a few points, and what was wrong."""
    out = tmp_path_factory.mktemp("operations") / "table.md"
    only = ["--only", "data convert, replaced", "align, replaced", "bad"]
    operations.preloaded("--points", "6", "--out", str(out), *only, module=__name__)
    return out.read_text().splitlines()


@pytest.mark.parametrize("name", ["data convert, replaced", "align, replaced"])
def test_a_command_killed_at_an_operation_loses_nothing_and_is_resumed(lines, name):
    assert not [line for line in lines if line.startswith(f"{name}, ")]
    (row,) = [line.split(" | ") for line in lines if line.startswith(f"| {name} | ")]
    assert int(row[1]) > 10, "operations"
    assert int(row[2]) + int(row[3]) == 6, "kills and errors"


def test_a_folder_that_is_replaced_in_steps_is_noticed_as_lost_and_not_resumed(lines):
    wrong = [line for line in lines if line.startswith("bad, kill")]
    assert any("lost: " in line and "not resumed: " in line for line in wrong)


if __name__ == "__main__":
    operations.CASES["bad"] = BAD
    sys.exit(operations.main())
