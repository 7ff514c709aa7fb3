"""A small predictor of structures for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.structures import save_esmfold


@pytest.fixture(scope="session")
def esmfold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_esmfold(tmp_path_factory.mktemp("esmfold"))
