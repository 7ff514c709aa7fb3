"""Stores for the tests of this folder."""

import shutil
from pathlib import Path

import pytest

from esmeray.dataset.store.sample import sample_records
from tests.dataset.stores import make_store, proteins


@pytest.fixture(scope="session")
def sample() -> list[tuple[str, str]]:
    """3,000 records, about a megabyte: several blocks."""
    return list(sample_records(3000, 30, seed=7))


@pytest.fixture(scope="session")
def pristine_store(tmp_path_factory: pytest.TempPathFactory, sample: list[tuple[str, str]]) -> Path:
    """The sample's store, to be read only."""
    return make_store(tmp_path_factory.mktemp("pristine"), sample)


@pytest.fixture(scope="session")
def small_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 120 random proteins, to be read only."""
    return make_store(tmp_path_factory.mktemp("small"))


@pytest.fixture
def store_path(tmp_path: Path, pristine_store: Path) -> Path:
    """A copy of the sample's store, to be damaged at will."""
    return Path(shutil.copytree(pristine_store, tmp_path / "store"))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Eight proteins of two classes."""
    return proteins(tmp_path, *"xyxyxyxy")
