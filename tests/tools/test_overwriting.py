import shutil
from pathlib import Path

import pytest

from tests.classifiers import labelled_fasta
from tests.embeddings import make_embeddings, random_vectors
from tests.monitoring import gpu_traces


@pytest.fixture(scope="module")
def inputs(artifacts, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(artifacts.classifier, folder / "model")
    labelled_fasta(folder / "proteins.fasta", [30, 4, 9])
    gpu_traces.thermal().write(folder / "log.csv")
    for name in ("one", "other"):
        make_embeddings(folder / name, random_vectors(5, 3))
    return folder


PROTEINS = ("--data.source", "proteins.fasta")
COMMANDS = {
    "predict": ("classify", "predict", "model", "--predict.input", "proteins.fasta", "--predict.output", "target.csv"),
    "evaluate": ("classify", "evaluate", "model", "--evaluate.input", "proteins.fasta", "--evaluate.output", "target"),
    "analyze_gpu_logs": ("profile", "log", "log.csv", "--profile.output", "target.png"),
    "embed": ("embed", "run", "--embed.models", "model", "--embed.input", "proteins.fasta", "--embed.output", "target"),
    "profile model": ("profile", "model", "model", *PROTEINS, "--profile.output", "target"),
    "fasta2lmdb": ("data", "convert", "--data.source", "proteins.fasta", "--convert.store", "target"),
    "concat_embeddings": ("embed", "join", "--join.folders", "one", "other", "--join.output", "target"),
    "search": ("embed", "search", "one", "--search.output", "target.tsv"),
    "plot_embeddings": ("embed", "plot", "one", "--plot.output", "target"),
}


def target_of(kind: str) -> str:
    return next(word for word in COMMANDS[kind] if word.startswith("target"))


@pytest.fixture
def here(inputs, command, tmp_path, monkeypatch) -> Path:
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", COMMANDS)
def test_what_the_tool_did_not_make_is_never_replaced(command, here, kind, monkeypatch):
    monkeypatch.setattr("esmeray.inference.classifier.ClassifierPipeline.load", None)  # refused before loading
    monkeypatch.setattr("esmeray.monitoring.gpu_log.reader.read_gpu_log", None)
    monkeypatch.setattr("esmeray.inference.profile.measuring.profile_model", None)
    target = here / target_of(kind)
    target.write_text("a thesis")
    before = {path: path.lstat().st_mtime_ns for path in here.rglob("*") if path.is_file()}
    for overwrite in ([], ["--overwrite"]):
        command.refused(2, target.name, *COMMANDS[kind], *overwrite)
    assert {path: path.lstat().st_mtime_ns for path in here.rglob("*") if path.is_file()} == before
