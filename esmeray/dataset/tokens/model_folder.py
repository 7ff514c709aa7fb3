"""Hugging Face models as files: a local folder or a name on the hub, fetched and read as data.

Nothing is imported or unpickled: patterns name what is fetched, and config.json is read as JSON before any class.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from esmeray.common.errors import ConfigError, ResourceError, naming_variables, read_json
from esmeray.common.remote import local_path
from esmeray.common.text import did_you_mean
from esmeray.common.verification import verified
from esmeray.run_folder.paths import EXPORT, METRICS

CONFIG_FILE = "config.json"
LEFT_OUT = re.compile(r"(checkpoints|wandb|monitoring)/.*|.*\.(bin|pt|pth|ckpt|pkl)")
"""Files of a model by URI that are not fetched."""


def local_folder(source: str, key: str, wanted: str = CONFIG_FILE) -> Path | None:
    """The folder of the model that ``source`` names, a run's export for a run; None if it is no path.

    ``key`` and ``wanted``, a file, are for messages. Of a URI a copy, without pickles and a run's checkpoints. Raises
    ConfigError where it is a file, a path that is not there, or a run without an export.
    """
    path = local_path(source, lambda name: not LEFT_OUT.fullmatch(name))
    # A run is a model wherever one is named, so that its weights can be trained further as well as embedded with.
    if (path / EXPORT).is_dir():
        return path / EXPORT
    if (path / METRICS).is_file():
        raise ConfigError(
            f"{key}: {source} is a run without an export, which it makes at its end; 'esmeray train export {source} "
            f"--export.output {source}/{EXPORT}' makes one of its newest checkpoint"
        )
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"{key}: {source} is a file; give the folder that holds {wanted}")
    # A folder of runs is no owner on the hub, which would be asked for long where it can't be reached.
    runs = {file.parent.name for file in path.parent.glob(f"*/{METRICS}")}
    if runs and "/" in source:  # in the folder of runs a size's name is still one
        raise ConfigError(f"{key}: there is no run {source}{did_you_mean(path.name, runs)}")
    # What is plainly a path is not asked for on the hub, whose names have one slash.
    if path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
        raise ConfigError(f"{key}: there is no folder {source}")
    return None


def fetch(name: str, patterns: Sequence[str], key: str, advice: str) -> Path:
    """Local folder of those files of a repository (owner/name) on the hub that match the globs; fetches no others.

    Raises ConfigError where there is no such public model, ResourceError where the hub can't be reached.
    """
    # Here, since few need them, and importing them takes a while.
    import httpx
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ConfigError(f"{key}: the hub has no (public) model {name}") from error
    # Refused, timed out, offline mode, proxy: of any type, since the hub chooses its HTTP client.
    except Exception as error:
        # A local one is of the cache alone: it is not known whether the hub has the file.
        if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
            raise ConfigError(f"{key}: {name} on the hub has no {patterns[0]}") from error
        with naming_variables():  # which may be the reason
            httpx.Client().close()
        unreachable = f"{key}: {name} is not in the local cache and the hub can't be reached; {advice}"
        raise ResourceError(unreachable) from error


def model_folder(source: str, patterns: Sequence[str], key: str, wanted: str = CONFIG_FILE) -> Path:
    """The local folder itself, or what a repository on the hub holds of these files.

    Raises ConfigError or ResourceError as :func:`local_folder` and :func:`fetch`.
    """
    folder = local_folder(source, key, wanted)
    if folder is None and "/" not in source:
        raise ConfigError(f"{key}: {source!r} is no folder nor a hub name, which has an owner, as facebook/esmfold_v1")
    return folder or fetch(source, patterns, key, "give a local folder")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' loading report and progress bars: what matters of it is checked and raised here."""
    from transformers.utils import logging  # here: it takes seconds

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def check_model(source: str, key: str) -> None:
    """Refuse a folder or hub name without a config.json, of which no more than that is fetched.

    Raises as :func:`model_folder`.
    """
    read_settings(model_folder(source, [CONFIG_FILE], key) / CONFIG_FILE, key)


def read_settings(path: Path, key: str) -> dict[str, Any]:
    """A JSON file as data, no class named in it is looked up.

    Raises ConfigError where it is missing, DataError where it is damaged or no dictionary.
    """
    if not path.is_file():
        raise ConfigError(f"{key}: {path.parent} has no {path.name}; give a Hugging Face model folder")
    return read_json(verified(path), f"give another {key}, or fetch or export the model again")
