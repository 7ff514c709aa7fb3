"""A flipped bit of any file of an export is noticed where the model is opened, or does no harm."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esmeray.common.errors import DataError
from esmeray.common.publishing import MADE_FILE
from esmeray.model.export.backbone import export
from tests.classifiers import export_tiny
from tests.damage import flipped, refuse_silence
from tests.inference.models.opened import opened, rows_of
from tests.model.support import build_model, tiny_section

EXPORTS: dict[str, Callable[[Path], Path]] = {
    "classifier": export_tiny,
    "masked_lm": lambda folder: export(build_model(tiny_section("masked_lm"), seed=4).eval(), folder),
}
WEIGHTS = ".safetensors"


def read(folder: Path) -> Any:
    model = opened(folder)
    return [model.facts.fingerprint, rows_of(model, ["MKTAYIAK"])["mean"].numpy()]


@pytest.mark.parametrize("kind", EXPORTS)
def test_a_flipped_bit_of_an_export_is_noticed(tmp_path: Path, kind: str):
    folder = EXPORTS[kind](tmp_path / "model")
    for path in folder.iterdir():
        if path.suffix != ".md" and (path.suffix == WEIGHTS or kind == "classifier"):
            assert refuse_silence(path, lambda: read(folder), 1) == 1 or path.suffix != WEIGHTS


def test_an_export_without_its_list_of_files_opens_and_one_with_it_says_what_to_do(tmp_path: Path):
    folder = export_tiny(tmp_path / "model")
    wanted = read(folder)[0]
    copied = shutil.copytree(folder, tmp_path / "hub", ignore=shutil.ignore_patterns(MADE_FILE))
    assert read(copied)[0] == wanted
    words = (
        r"model\.safetensors: damaged: .*; make or copy .* again; if you changed it yourself, remove its esmeray.json"
    )
    with flipped(folder / "model.safetensors", 50_000), pytest.raises(DataError, match=words):
        read(folder)
