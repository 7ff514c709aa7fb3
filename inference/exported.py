"""An exported classifier as a command names it: its folder and its settings.

Nothing here needs torch until the classifier is loaded, so that mistakes are reported at once.
"""

from pathlib import Path

from dataset.labels.label_space import LabelSpace
from inference.models.source import exported_by
from model.export.exported_folder import read_settings
from train_config.loading import load_config, load_recorded
from train_config.schema import Config
from train_config.section import Overrides


def config_of(source: str | Path, overrides: Overrides | None = None) -> Config:
    """The settings that an exported classifier was trained with, overridden; the defaults where its folder has none."""
    path = exported_by("classifier", source) / "config.yaml"
    return load_recorded(path, overrides) if path.is_file() else load_config(None, overrides)


def label_space_of(source: str | Path) -> LabelSpace:
    """Label space of an exported classifier, from its files alone; raises DataError where they are damaged."""
    folder = exported_by("classifier", source)
    read_settings(folder)
    return LabelSpace.load(folder)


def run_folder(source: str | Path) -> Path | None:
    """The folder of the run that ``source`` is, or in which it was exported."""
    folder = Path(source).expanduser().absolute()
    return next((path for path in (folder, folder.parent) if (path / "metrics.jsonl").is_file()), None)
