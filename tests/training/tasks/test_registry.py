from typing import get_args

import pytest

from tests.runs import tiny_config
from train_config.schema import ModelSection
from training.tasks.experiment import Experiment
from training.tasks.plan import TaskPlan
from training.tasks.registry import TASKS, experiment_class, task_plan


@pytest.mark.parametrize("task", get_args(ModelSection.model_fields["task"].annotation))
def test_every_task_of_the_schema_is_one_line_of_the_registry(task, tmp_path):
    assert isinstance(task_plan(tiny_config(tmp_path, model={"task": task})), TaskPlan)
    assert issubclass(experiment_class(task), Experiment) and not experiment_class(task).__abstractmethods__
    assert task in TASKS
