import os
import shutil
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from esmeray.tasks.experiment import Experiment, experiment_class
from esmeray.tasks.plan import TaskPlan, task_plan
from esmeray.tasks.registry import TASKS, task_named
from tests.runs import TINY, tiny_config

ROOT = Path(__file__).resolve().parents[2]

TRAIN = f"""
import sys
from pathlib import Path
import torch.distributed as dist
from esmeray.tasks.opening import open_exported
from esmeray.run_folder.paths import RunFolder
from esmeray.train_config.natures import with_absolute_paths
from esmeray.training.config import Config
from esmeray.cluster.collective import WorkerContext
from esmeray.training.loop.worker import train_worker
from esmeray.tasks.plan import task_plan

folder = Path(sys.argv[1])
settings = {TINY!r}
settings["model"]["task"] = "toy"
settings["training"]["max_steps"] = 3
settings["run"] = {{"name": "toy", "storage_path": str(folder)}}
config = with_absolute_paths(Config.model_validate(settings))
run = RunFolder(config.run.storage_path, config.run.name)
path = task_plan(config.data, config.model).prepare(run.stores)
run.path.mkdir()
dist.init_process_group("gloo", init_method=f"file://{{folder / 'group'}}", rank=0, world_size=1)
assert train_worker(config, WorkerContext(), str(path)).status == "finished"
assert open_exported("toy", run.export).backbone.num_layers == 1
"""


@pytest.mark.parametrize("name", TASKS)
def test_package_of_a_task_is_complete(name: str, tmp_path: Path):
    config = tiny_config(tmp_path, model={"task": name})
    assert isinstance(task_plan(config.data, config.model), TaskPlan)
    experiment = experiment_class(config.model)
    assert issubclass(experiment, Experiment) and not experiment.__abstractmethods__
    opener = task_named(name).opener
    assert opener is None or callable(resolve_name(opener))


@pytest.mark.slow
def test_new_task_is_its_package_and_its_name_in_the_registry(tmp_path: Path):
    tree = copied_tree(tmp_path / "tree")
    package = tree / "tasks" / "toy"
    shutil.copytree(package.with_name("masked_lm"), package)
    for file in package.glob("*.py"):
        file.write_text(file.read_text(encoding="utf-8").replace("tasks.masked_lm", "tasks.toy"), encoding="utf-8")
    replace(package.parent / "registry.py", 'TASKS = ("', 'TASKS = ("toy", "')
    replace(package / "experiment.py", "self.settings.model.masked_lm", "self.settings.model.toy")
    environment = {**os.environ, "PYTHONPATH": str(tree), "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-c", TRAIN, str(tmp_path)], cwd=tree, env=environment, check=True, timeout=120)
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("## A new task")[2].partition("\n## ")[0]
    assert all(f"`{file}`" in page for file in {"tasks/registry.py", *(path.name for path in package.glob("*.py"))})


def copied_tree(tree: Path) -> Path:
    """This repository's folders, of which those that a task touches are copies."""
    tree.mkdir()
    for folder in ROOT.iterdir():
        if folder.name in ("esmeray", "tasks"):
            shutil.copytree(folder, tree / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (folder / "__init__.py").is_file():
            (tree / folder.name).symlink_to(folder)
    shutil.copy(ROOT / "train_ray.py", tree)  # by which a checkout is known
    return tree


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{path} has no {old!r}"
    path.write_text(text.replace(old, new), encoding="utf-8")
