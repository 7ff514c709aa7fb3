from pathlib import Path
from pkgutil import resolve_name

import pytest

from esmeray.tasks.experiment import Experiment, experiment_class
from esmeray.tasks.plan import TaskPlan, task_plan
from esmeray.tasks.registry import TASKS, task_named
from tests.runs import tiny_config


@pytest.mark.parametrize("name", TASKS)
def test_package_of_a_task_is_complete(name: str, tmp_path: Path):
    config = tiny_config(tmp_path, model={"task": name})
    assert isinstance(task_plan(config.data, config.model), TaskPlan)
    experiment = experiment_class(config.model)
    assert issubclass(experiment, Experiment) and not experiment.__abstractmethods__
    opener = task_named(name).opener
    assert opener is None or callable(resolve_name(opener))
