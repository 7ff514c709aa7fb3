from pathlib import Path
from typing import get_args

import pytest

from tests.runs import tiny_config
from train_config.schema import ModelSection
from training.tasks.experiment import Experiment
from training.tasks.plan import TaskPlan
from training.tasks.registry import TASKS, experiment_class, task_named, task_plan


def test_every_task_of_the_schema_is_one_name_in_the_registry():
    assert sorted(TASKS) == sorted(get_args(ModelSection.model_fields["task"].annotation))


@pytest.mark.parametrize("name", TASKS)
def test_package_of_a_task_is_complete(name: str, tmp_path: Path):
    task = task_named(name)
    assert ModelSection.model_fields[name].annotation is task.load("section")
    assert isinstance(task_plan(tiny_config(tmp_path, model={"task": name})), TaskPlan)
    assert issubclass(experiment_class(name), Experiment) and not experiment_class(name).__abstractmethods__
    assert callable(task.load("open"))
