from pathlib import Path
from pkgutil import resolve_name

import pytest

from esmeray.tasks.experiment import Experiment, experiment_class
from esmeray.tasks.plan import TaskPlan, task_plan
from esmeray.tasks.registry import TASKS, task_named
from tests.conftest import REPOSITORY
from tests.runs import tiny_config


@pytest.mark.parametrize("name", TASKS)
def test_package_of_a_task_is_complete(name: str, tmp_path: Path):
    config = tiny_config(tmp_path, model={"task": name})
    assert isinstance(task_plan(config.data, config.model), TaskPlan)
    experiment = experiment_class(config.model)
    assert issubclass(experiment, Experiment) and not experiment.__abstractmethods__
    opener = task_named(name).opener
    assert opener is None or callable(resolve_name(opener))


def test_the_page_on_a_new_task_names_every_file_of_a_task_s_package():
    """tests/esmeray/test_additions.py adds one."""
    page = (REPOSITORY / "docs" / "design.md").read_text(encoding="utf-8")
    section = page.partition("## A new task")[2].partition("\n## ")[0]
    names = [path.name for path in (REPOSITORY / "tasks" / "masked_lm").glob("*.py")]
    assert len(names) > 3 and all(f"`{file}`" in section for file in ("tasks/registry.py", *names))
