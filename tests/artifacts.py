"""Small models and runs that tests read and never change; created at first use, once per test process."""

from functools import cached_property
from pathlib import Path
from unittest import mock

from esmeray.common.command_line import run
from esmeray.model.export.backbone import export
from esmeray.run_folder.paths import RunFolder
from esmeray.tools.__main__ import main as esmeray
from tests.classifiers import classifier_config, export_tiny
from tests.clusters import REPOSITORY
from tests.inference.embedding.jobs import small_model_folder
from tests.runs import run_folder, tiny_config
from tests.tasks.test_diffusion_model import trained
from tests.training.runs import finish

SMALL_FUNCTION = [
    "--data.sample.records",
    "150",
    "--data.sample.families",
    "30",
    "--training.epochs",
    "4",
    "--training.warmup_steps",
    "0",
    "--model.classifier.hidden_size",
    "16",
    "--batch.batch_size",
    "16",
    "--checkpoint.every_steps",
    "4",
    "--training.evaluate_every_steps",
    "4",
    "--data.terms.min_count",
    "3",
]


def function_training(folder: Path) -> list[str]:
    """Command line that trains a small function predictor in ``folder``."""
    config = str(REPOSITORY / "train_config/function.yaml")
    options = ["--config", config, "--run.storage_path", str(folder), "--wandb.mode", "disabled"]
    return ["train", *options, *SMALL_FUNCTION]


class Artifacts:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def autoencoder(self) -> RunFolder:
        """Run folder of a finished autoencoder run."""
        config = tiny_config(self._folder, run={"name": "esm2ae"})
        finish(config)
        return run_folder(config)

    @cached_property
    def function(self) -> Path:
        """Run folder of a finished function prediction run, without plots."""
        with mock.patch("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch()):
            assert run(esmeray, function_training(self._folder)) == 0
        return self._folder / "function"

    @cached_property
    def diffusion(self) -> Path:
        """Run folder with the export of a design model with two labels."""
        folder = self._folder / "structdiff"
        export(trained(("helix", "barrel")), folder / "export")
        return folder

    @cached_property
    def classifier(self) -> Path:
        """Export of a classifier with three classes; labels are word 1 of FASTA headers."""
        return export_tiny(self._folder / "classifier", classifier_config(labels={"header_field": 1}))

    @cached_property
    def encoder(self) -> Path:
        """Folder of a small ESM-2 in Hugging Face format."""
        return small_model_folder(self._folder / "encoder")
