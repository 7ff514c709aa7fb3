"""Another installed package adds a task with its settings, an output, a format and a backbone, and the tree stays as it
is."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.runs import TINY

FILES = {
    "toy-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n",
    "toy-1.0.dist-info/entry_points.txt": """
[esmeray.tasks]
toy = toy.task:TASK
[esmeray.outputs]
first = toy.parts:FIRST
[esmeray.formats]
toyfile = toy.parts:ToyFormat
[esmeray.backbones]
olmo = toy.parts:IS_CAUSAL
""",
    "toy/settings.py": '''
from esmeray.train_config.section import Section

class ToySection(Section):
    """Settings of the toy."""

    strength: float = 1.0
    """Strength of the toy."""
''',
    "toy/task.py": """
from esmeray.tasks.registry import Task
from toy.settings import ToySection

TASK = Task(
    section=ToySection,
    plan="esmeray.tasks.plan:ResiduePlan",
    experiment="toy.experiment:ToyExperiment",
)
""",
    "toy/experiment.py": """
from esmeray.tasks.masked_lm.experiment import MaskedLMExperiment

class ToyExperiment(MaskedLMExperiment):
    def build_model(self, *arguments, **named):
        assert self.settings.model.toy.strength == 2.5
        return super().build_model(*arguments, **named)
""",
    "toy/parts.py": """
from esmeray.dataset.embeddings.formats.npy import Npy
from esmeray.inference.models.kinds import OutputKind
from esmeray.model.heads.pooling import first_token

IS_CAUSAL = True
FIRST = OutputKind("first residue", rows=lambda model, features_TD, packed: first_token(features_TD, packed.batch))

class ToyFormat(Npy):
    name = "toyfile"
    suffix = ".toy"
""",
}
USE = f"""
import asyncio, sys
from pathlib import Path
import torch.distributed as dist
from esmeray.common.command_line import run
from esmeray.model.backbones.source import PACKED
from esmeray.run_folder.paths import RunFolder
from esmeray.service.replicas.replica import ModelReplica
from esmeray.tools.__main__ import main
from esmeray.train_config.natures import with_absolute_paths
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


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python in a process which has the package installed."""
    for name, text in FILES.items():
        path = tmp_path / "installed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'installed'}:{REPOSITORY}", "DS_ACCELERATOR": "cpu"}
    options = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 200}
    return lambda *words: subprocess.run([sys.executable, *words], check=False, **options)


@pytest.mark.slow
def test_a_package_adds_a_task_with_its_help_an_output_a_format_and_a_backbone(tmp_path: Path, python):
    done = python("-c", USE, str(tmp_path))
    for text in ("--model.toy.strength", "Strength of the toy.", ",toy}"):
        assert text in done.stdout, done.stderr


def test_what_a_package_breaks_is_one_line(tmp_path: Path, python):
    (tmp_path / "installed" / "toy" / "settings.py").write_text("import absent\n")
    broken = python("-m", "esmeray.tools", "train", "--help")
    assert (broken.returncode, broken.stderr.count("\n")) == (2, 1)
    assert "the installed package toy adds toy to esmeray.tasks" in broken.stderr and "absent" in broken.stderr
    entry_points = tmp_path / "installed" / "toy-1.0.dist-info" / "entry_points.txt"
    entry_points.write_text(FILES["toy-1.0.dist-info/entry_points.txt"].replace("toy = toy", "masked_lm = toy"))
    taken = python("-m", "esmeray.tools", "train", "--help")
    assert (taken.returncode, taken.stderr.count("\n")) == (2, 1)
    assert "adds masked_lm to esmeray.tasks, where this name is taken" in taken.stderr
