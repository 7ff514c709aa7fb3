"""Installed packages can add a task with settings, an output, a format and a backbone without changes to Esmeray."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import invalidate_caches
from pathlib import Path

import pytest

from esmeray import installation
from esmeray.common.errors import UNUSABLE, did_you_mean
from esmeray.dataset.embeddings.formats.registry import FORMATS
from esmeray.dataset.embeddings.formats.registry import _checked as checked_format
from esmeray.inference.models.kinds import output_names
from esmeray.installation import added
from esmeray.model.backbones.source import PACKED
from esmeray.tasks.registry import TASKS, task_names
from esmeray.tasks.section import SharedModelSection
from esmeray.train_config.section import Section
from tests.conftest import REPOSITORY
from tests.runs import TINY

PAGE = (REPOSITORY / "docs" / "howto.md").read_text(encoding="utf-8")
METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: 1.0\n"


def write_package(folder: Path, name: str, groups: dict[str, dict[str, str]], files: dict[str, str]) -> None:
    """Write the files and metadata of an installed package with these entry points."""
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    metadata = {"METADATA": METADATA.format(name), "entry_points.txt": "\n".join(lines)}
    for path, text in {**{f"{name}-1.0.dist-info/{file}": text for file, text in metadata.items()}, **files}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


USE = f"""
import asyncio, sys
from pathlib import Path
import torch.distributed as dist
from esmeray.common.command_line import run
from esmeray.model.backbones.source import PACKED
from esmeray.run_folder.paths import RunFolder
from esmeray.service.replicas.replica import ModelReplica
from esmeray.tools.__main__ import main
from esmeray.train_config.section import with_absolute_paths
from esmeray.training.config import Config
from esmeray.service.section import ServedModel
from esmeray.cluster.collective import WorkerContext
from esmeray.training.loop.worker import train_worker
from esmeray.tasks.plan import task_plan
import esmeray

folder = Path(sys.argv[1])
settings = {TINY!r}
settings["model"] |= {{"task": "toy", "toy": {{"strength": 2.5}}}}
settings["training"]["max_steps"] = 3
settings["run"] = {{"name": "toy", "storage_path": str(folder)}}
config = with_absolute_paths(Config.model_validate(settings))
made = RunFolder(config.run.storage_path, config.run.name)
path = task_plan(config.data, config.model).prepare(made.stores)
made.path.mkdir()
dist.init_process_group("gloo", init_method=f"file://{{folder / 'group'}}", rank=0, world_size=1)
assert train_worker(config, WorkerContext(), str(path)).status == "finished"
made.config.write_text("")  # as a run has it, which is found by its export

(folder / "a.fasta").write_text(">a\\nMKTAYIAKQR\\n>b\\nMKV\\n")
how = ["--embed.outputs", "first", "mean", "--embed.format", "toyfile", "--embed.device", "cpu"]
files = ["--embed.input", str(folder / "a.fasta"), "--embed.output", str(folder / "v")]
assert run(main, ["embed", "run", "--embed.models", str(made.export), *how, *files]) == 0
assert (folder / "v" / "first.toy").is_file()
assert esmeray.read_embeddings(folder / "v", "first")["b"].shape == (16,)
replica = ModelReplica(ServedModel(name="toy", source=str(made.export), tokens=64).model_dump(), "cpu", "1")
assert asyncio.run(replica.run("first", ["MKTAY"], "me")).results.shape == (1, 16)
assert PACKED["olmo"]
main(["train", "--help"])
"""

REFUSED_AND_HELP = """
from esmeray.common.command_line import run
from esmeray.tools.__main__ import main

print(run(main, "train --config masked_lm --model.task toy".split()))
main("train --config masked_lm --help".split())
"""


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Function that runs Python in a process with the package installed."""
    (metadata,) = re.findall(r"^```toml\n(.*entry-points.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    files = dict(re.findall(r"^```py\n# (\S+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
    write_package(tmp_path / "installed", "toy", tomllib.loads(metadata)["project"]["entry-points"], files)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'installed'}:{REPOSITORY}", "DS_ACCELERATOR": "cpu"}
    options = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 200}
    return lambda *words: subprocess.run([sys.executable, *words], check=False, **options)


@pytest.mark.slow
def test_a_package_can_add_a_task_an_output_a_format_and_a_backbone(tmp_path: Path, python):
    done = python("-c", USE, str(tmp_path))
    for text in ("strength 2.5", "--model.toy.strength", "Strength of the toy.", ",toy}"):
        assert text in done.stdout, done.stderr


def test_a_package_that_exits_on_import_causes_one_warning(tmp_path: Path, python):
    (tmp_path / "installed" / "toy" / "settings.py").write_text(
        "print('printed by an import')\nimport sys\nsys.exit(0)\n"
    )
    reason = "'toy' of esmeray.tasks, by the package toy, can't be used (SystemExit: 0); fix or uninstall it"
    shown = python("-c", REFUSED_AND_HELP)
    assert shown.returncode == 0 and shown.stdout.startswith("2\nusage") and "printed by" not in shown.stdout
    (error,) = [line for line in shown.stderr.splitlines() if line.startswith("error: --model.task")]
    assert reason in error and shown.stderr.count("warning: ") == shown.stderr.count(f"warning: {reason}\n") == 1


BROKEN = {
    "import absent": "ModuleNotFoundError: No module named 'absent'",
    "def (": "SyntaxError: invalid syntax",
    "raise SystemExit(1)": "SystemExit: 1",
    "raise BaseException('a\\nb')": "BaseException: a",
    "IT = 'text'": "it is 'text', not a",
    "import json as IT": "it is <module 'json'",
    "IT = None": "it is None, not a",
    "class IT: pass": "not a",
    "OTHER = 1": "AttributeError: module 'broken' has no attribute 'IT'",
}
"""Source texts of an entry point's module, and the reasons for their refusal."""
HALF = {
    "tasks": (
        ("IT = Task(None, 'a:b', 'a:b')", "AttributeError: 'NoneType' object has no attribute 'of'"),
        ("IT = Task(Section, 'a:b', 'a:b', metrics={'a': 'b'})", "a metric is 'b', not a MetricLabel"),
        ("class Own(Section):\n    x: int\nIT = Task(Own, 'a:b', 'a:b')", "x: field required"),
    ),
    "outputs": (("IT = OutputKind('x', rows=None)", "rows is None, not a Callable"),),
    "formats": (
        ("class IT(Format): pass", "TypeError: Can't instantiate abstract class"),
        ("class IT(Npy): pass", "name is 'npy'"),
        ("class IT(Npy):\n    name, suffix = 'new', None", "suffix is None, not a str"),
    ),
    "backbones": (("IT = 1", "it is 1, not a bool"),),
}
"""Objects of the right type that can't be used, by group of entry points."""
IMPORTS = """
from esmeray.dataset.embeddings.formats.arrays import Format, Npy
from esmeray.inference.models.kinds import OutputKind
from esmeray.tasks.registry import Task
from esmeray.train_config.section import Section
"""
LOAD = {
    "tasks": task_names,
    "outputs": output_names,
    "formats": lambda: added("formats", tuple(FORMATS), type, checked_format),
    "backbones": lambda: added("backbones", tuple(PACKED), bool),
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch) -> Iterator[Callable[..., None]]:
    """Function that installs a package for one test, from a group, entry point names and the module's text."""

    def write(kind: str, names: list[str], text: str, package: str = "broken") -> None:
        sys.modules.pop(package, None)
        invalidate_caches()
        write_package(
            tmp_path, package, {f"esmeray.{kind}": dict.fromkeys(names, f"{package}:IT")}, {f"{package}.py": text}
        )
        forget()

    def forget() -> None:
        added.cache_clear()
        installation._entry_points.cache_clear()
        UNUSABLE.clear()

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("ESMERAY_WARNING_PROCESS", raising=False)
    yield write
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("kind", LOAD)
def test_a_broken_entry_point_causes_one_warning_and_explains_its_names(kind: str, install, capsys):
    variants = [*BROKEN.items(), *((f"{IMPORTS}{text}", reason) for text, reason in HALF[kind])]
    for text, reason in variants:
        install(kind, ["new"], text)
        assert "new" not in LOAD[kind]()
        assert "new" not in LOAD[kind]()
        (warning,) = capsys.readouterr().err.splitlines()
        assert warning.startswith(f"warning: 'new' of esmeray.{kind}, by the package broken, can't be used (")
        assert reason in warning, text
        assert did_you_mean("--model.new.x", ()) == f" ({warning.removeprefix('warning: ')})"


@pytest.mark.parametrize("kind", LOAD)
def test_a_name_that_is_taken_or_odd_leaves_ours_as_it_is(kind: str, install, capsys):
    ours = {"tasks": "masked_lm", "outputs": "mean", "formats": "npy", "backbones": "bert"}[kind]
    before = [*LOAD[kind]()]
    install(kind, [ours, "new", "a b", "../x", "ä", "a.b", "_x"], "IT = 1 / 0")
    install(kind, ["new"], "IT = 1 / 0", package="other")
    assert [*LOAD[kind]()] == before
    reasons = [line.partition("(")[2].partition(")")[0] for line in capsys.readouterr().err.splitlines()]
    odd = "a name has letters, digits, - and _ only"
    assert sorted(reasons) == sorted(["this name is taken", *["this name is added more than once"] * 2, *[odd] * 5])
    assert ours not in UNUSABLE


def test_ctrl_c_and_the_signals_of_clusters_end_an_import(install):
    install("outputs", ["new"], "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        output_names()


def test_names_of_settings_of_models_are_taken():
    names = set(SharedModelSection.model_fields) | {"copy", "model_config", "of"}
    assert not names - {*TASKS, "task", "backbone", "tokenizer", *dir(Section)}
