from dataclasses import replace

import pytest

from esmeray.cluster.placement import NodeResources, Workers
from esmeray.common.errors import ConfigError, ResourceError
from esmeray.tuning.records import Job, Settings
from esmeray.tuning.section import TuneConfig
from esmeray.tuning.space import SearchSpace, make_space, needs_at_least
from tests.runs import merged, tiny_config

CPUS = [NodeResources(cpus=2, gpus=0)]
GPUS = [NodeResources(cpus=16, gpus=4)]


def job_of(folder, values: dict | None = None, keep: bool = True, **changes) -> Job:
    search = TuneConfig.model_validate({"space": values or {}, "keep_global_tokens": keep})
    return Job(tiny_config(folder, **merged({"ray": {"num_workers": 1}}, changes)), search)


def space_of(
    folder, values: dict | None = None, nodes=CPUS, keep: bool = True, data_tokens: int | None = None, **changes
) -> SearchSpace:
    return make_space(job_of(folder, values, keep, **changes), nodes, data_tokens)


def budgets(space: SearchSpace) -> list[int]:
    return sorted({settings.tokens for settings in space.settings})


def test_settings_of_the_applied_config_are_the_settings(tmp_path):
    settings = Settings(512, 7, 2, "bf16", 4)
    job = job_of(tmp_path, batch={"global_tokens": 1024})
    kept = job.trial_config(settings)
    assert replace(job, config=kept).own_settings(Workers(4, 1, False)) == settings
    assert kept.batch.global_tokens == 1024
    assert job_of(tmp_path, keep=False).trial_config(settings).batch.global_tokens == 4 * 512


def test_budgets_and_workers_divide_the_global_batch_unless_it_is_not_kept(tmp_path):
    space = space_of(tmp_path, {"workers": [1, 2]}, batch={"tokens": 96, "global_tokens": 384})
    assert {(s.tokens, s.workers) for s in space.settings} == {(64, 1), (96, 1), (128, 1), (64, 2), (96, 2)}
    assert space.default.tokens == 96
    assert "do not divide batch.global_tokens (384)" in next(iter(space.left_out))
    free = space_of(tmp_path, {"workers": [1], "tokens": [64, 100]}, keep=False)
    assert {settings.tokens for settings in free.settings} == {64, 100}


def test_default_budgets_range_from_longest_sequence_to_global_batch(tmp_path):
    assert budgets(space_of(tmp_path)) == [64, 128, 256, 512]
    assert budgets(space_of(tmp_path, data={"max_length": 63})) == [128, 256, 512]
    alone = {"num_workers": [1], "precision": ["bf16"]}
    space = space_of(tmp_path, alone, keep=False, data_tokens=450)
    # Four budgets per doubling if no other setting is searched.
    assert budgets(space) == [64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448]
    assert budgets(space_of(tmp_path, keep=False, data_tokens=1100)) == [64, 128, 256, 512, 1024]
    assert max(budgets(space_of(tmp_path, data_tokens=9000))) == 512, "the global batch is kept"


def test_trial_gets_the_cores_of_its_devices(tmp_path):
    assert space_of(tmp_path, {"workers": [1, 2]}, nodes=GPUS).workers[1] == Workers(1, 4, use_gpu=True)
    assert space_of(tmp_path, {"workers": [1, 2]}).workers == {1: Workers(1, 2, False), 2: Workers(2, 1, False)}
    few = space_of(tmp_path, nodes=GPUS, ray={"cpus_per_worker": 2})
    assert few.workers == {1: Workers(1, 2, use_gpu=True)}
    half = space_of(tmp_path, {"workers": [1, 4, 8], "precision": ["fp16"]}, nodes=GPUS)
    assert {(settings.workers, settings.precision) for settings in half.settings} == {(1, "fp16"), (4, "fp16")}


def test_default_is_the_experiment_itself_or_the_nearest_that_is_offered(tmp_path):
    assert space_of(tmp_path).default == Settings(256, None, 0, "fp32", 1)
    space = space_of(tmp_path, {"tokens": [64, 512], "num_workers": [1, 3], "precision": ["bf16"]})
    assert space.default == Settings(512, None, 1, "bf16", 1)
    space = space_of(tmp_path, {"workers": [1, 2]})
    largest = replace(space.default, tokens=512)
    assert space.nearest(replace(largest, workers=2)) == replace(largest, workers=2, tokens=256)


def test_empty_search_space_is_refused_with_the_reasons(tmp_path):
    with pytest.raises(ConfigError, match="none of 6 configurations is valid: 6 excluded for a budget below"):
        space_of(tmp_path, {"tokens": [32]})
    with pytest.raises(ResourceError, match="9 workers with"):
        space_of(tmp_path, ray={"num_workers": 9})


def test_what_needs_at_least_as_much_memory():
    base = Settings(1024, None, 1, "bf16", 2)
    more = [{"tokens": 2048}, {"precision": "fp32"}, {"num_workers": 0}]
    maybe_less = [{"tokens": 512}, {"precision": "fp16"}, {"workers": 1}, {"workers": 4}]
    maybe_less += [{"batch_size": 8}]
    assert all(needs_at_least(replace(base, **change), base) for change in more)
    assert not any(needs_at_least(replace(base, **change), base) for change in maybe_less)
