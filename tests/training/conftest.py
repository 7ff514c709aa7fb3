import pytest

from esmeray.training.config import Config
from tests.runs import tiny_config
from tests.training.runs import train


@pytest.fixture(scope="session")
def undisturbed(process_group: None, store_path: str, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The tiny run, of one worker, that nothing went wrong in."""
    config = tiny_config(tmp_path_factory.mktemp("undisturbed"))
    train(config, store_path)
    return config
