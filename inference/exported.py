"""The folder of an exported classifier, and the settings that it was trained with.

Nothing here needs torch, so that mistakes in the folder or the settings are reported at once.
"""

from __future__ import annotations

from pathlib import Path

from common.errors import ConfigError
from dataset.labels.label_space import LabelSpace
from model.export.exported_folder import CONFIG_FILE, read_settings
from train_config.loading import load_config
from train_config.schema import Config
from train_config.section import Overrides

EXPORT_FOLDER = "export"
"""Of a run."""


def model_folder(source: str | Path) -> Path:
    """The folder of the exported classifier that ``source`` means: itself, or the export of a run.

    Raises:
        ConfigError: neither holds one.
    """
    folder = Path(source).expanduser().absolute()
    for candidate in (folder, folder / EXPORT_FOLDER):
        if (candidate / CONFIG_FILE).is_file():
            return candidate
    if not folder.is_dir():
        raise ConfigError(f"{source}: there is no such folder; give an exported classifier or a run that has one")
    raise ConfigError(
        f"{source}: holds no exported classifier (no {CONFIG_FILE} in it or in {EXPORT_FOLDER}/); a run exports one at "
        f"its end, and 'python -m tools export RUN' does so from a checkpoint"
    )


def config_of(source: str | Path, overrides: Overrides | None = None) -> Config:
    """The settings that an exported classifier was trained with; the defaults where its folder has none.

    Args:
        source: the folder, or that of the run.
        overrides: settings of the command line, which take precedence.

    Raises:
        ConfigError: there is no classifier, or a setting is wrong.
    """
    return load_config(config_file(model_folder(source)), overrides)


def config_file(folder: Path) -> Path | None:
    """The resolved config that was exported with a model, if any."""
    path = folder / "config.yaml"
    return path if path.is_file() else None


def label_space_of(source: str | Path) -> LabelSpace:
    """Label space of an exported classifier, from its files alone.

    Raises:
        ConfigError: there is no classifier.
        DataError: its files are damaged.
    """
    folder = model_folder(source)
    read_settings(folder)
    return LabelSpace.load(folder)


def run_folder(source: str | Path) -> Path | None:
    """The folder of the run that ``source`` is, or in which it was exported."""
    folder = Path(source).expanduser().absolute()
    return next((path for path in (folder, folder.parent) if (path / "metrics.jsonl").is_file()), None)
