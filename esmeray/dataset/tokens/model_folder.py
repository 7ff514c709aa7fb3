"""Hugging Face models as files: fetch and read local folders or names on the hub as data.

Nothing is imported or unpickled. Patterns select the files to fetch, and config.json is read as plain JSON.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from esmeray.common.errors import ConfigError, ResourceError, did_you_mean, naming_variables, read_json
from esmeray.common.publishing import verified
from esmeray.common.remote import local_path
from esmeray.run_folder.paths import EXPORT, METRICS

CONFIG_FILE = "config.json"
LEFT_OUT = re.compile(r"(checkpoints|wandb|monitoring)/.*|.*\.(bin|pt|pth|ckpt|pkl)")
"""Files of a model at a URI that are not fetched: checkpoints, logs and pickles."""


def local_folder(source: str, key: str, wanted: str = CONFIG_FILE) -> Path | None:
    """Return the local folder of the model ``source``, or None if it is not a path.

    For a run, this is its export; for a URI, a local copy without pickles and a run's checkpoints. ``key`` and
    ``wanted`` (a file) are for messages. Raises ConfigError for a file, a missing path, or a run without an export.
    """
    path = local_path(source, lambda name: not LEFT_OUT.fullmatch(name))
    # A run can be used wherever a model is expected, to train its weights further or to embed.
    if (path / EXPORT).is_dir():
        return path / EXPORT
    if (path / METRICS).is_file():
        raise ConfigError(
            f"{key}: {source} is a run without an export, because it has not finished; to export its newest "
            f"checkpoint, run 'esmeray train export {source} --export.output {source}/{EXPORT}'"
        )
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"{key}: {source} is a file; give the folder that contains {wanted}")
    # A name in a folder of runs is not a hub name. Asking the hub would take long if it is unreachable.
    runs = {file.parent.name for file in path.parent.glob(f"*/{METRICS}")}
    if runs and "/" in source:  # without a slash, it may still be the name of a model size
        raise ConfigError(f"{key}: run {source} not found{did_you_mean(path.name, runs)}")
    # Hub names have one slash, so don't ask the hub for anything that is clearly a path.
    if path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
        raise ConfigError(f"{key}: folder {source} not found")
    return None


def fetch(name: str, patterns: Sequence[str], key: str, advice: str) -> Path:
    """Fetch the files of a hub repository (owner/name) that match the globs; return their local folder.

    Raises ConfigError if there is no such public model, ResourceError if the hub is unreachable.
    """
    # Imported here, because few callers need them and they are slow to import.
    import httpx
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ConfigError(f"{key}: no public model {name} on the Hugging Face hub") from error
    # Refused, timed out, offline, proxy: the exception's type depends on the hub's HTTP client.
    except Exception as error:
        # LocalEntryNotFoundError only means that the cache lacks the file; the hub may have it.
        if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
            raise ConfigError(f"{key}: {name} on the hub has no {patterns[0]}") from error
        with naming_variables():  # environment variables may be the reason
            httpx.Client().close()
        unreachable = f"{key}: {name} is not in the local cache and the hub can't be reached; {advice}"
        raise ResourceError(unreachable) from error


def model_folder(source: str, patterns: Sequence[str], key: str, wanted: str = CONFIG_FILE) -> Path:
    """Return a local folder as it is, or fetch the matching files of a hub repository.

    Raises ConfigError or ResourceError as :func:`local_folder` and :func:`fetch`.
    """
    folder = local_folder(source, key, wanted)
    if folder is None and "/" not in source:
        raise ConfigError(
            f"{key}: {source!r} is neither a folder nor a hub name (OWNER/NAME, e.g. facebook/esmfold_v1)"
        )
    return folder or fetch(source, patterns, key, "give a local folder")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' loading report and progress bars: relevant problems are checked and raised here."""
    from transformers.utils import logging  # imported here, because it takes seconds

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
    """Raise an error if a folder or hub name has no config.json. Fetches only that file.

    Raises as :func:`model_folder`.
    """
    read_settings(model_folder(source, [CONFIG_FILE], key) / CONFIG_FILE, key)


def read_settings(path: Path, key: str) -> dict[str, Any]:
    """Read a JSON file as data, without looking up the classes that it names.

    Raises ConfigError if it is missing, DataError if it is damaged or not a dictionary.
    """
    if not path.is_file():
        raise ConfigError(f"{key}: {path.parent} has no {path.name}; give a Hugging Face model folder")
    return read_json(verified(path), f"give another {key}, or fetch or export the model again")
