"""``serve run`` checks its settings before it starts, and prints them."""

import yaml
from ray.serve.schema import ApplicationStatusOverview

from esmeray.common.errors import ConfigError, ResourceError
from esmeray.service.running import deployment_error
from esmeray.service.section import ServiceSettings
from tests.conftest import REPOSITORY


def test_a_dry_run_prints_the_resolved_settings(command):
    file = REPOSITORY / "train_config" / "serve.yaml"
    outcome = command.done(
        f"serve run --config {file} --serve.port 8080 --serve.access.keys keys.yaml --serve.host 0.0.0.0 --dry_run"
    )
    config = ServiceSettings.model_validate(yaml.safe_load(outcome.out)).serve
    assert (config.port, config.host, config.access.keys) == (8080, "0.0.0.0", "keys.yaml")
    assert config.models[0].name == "esm2_t6_8M" and config.models[0].random_weights
    outcome = command.done("serve run --serve.models facebook/esm2_t6_8M_UR50D runs/locations/export --dry_run")
    models = yaml.safe_load(outcome.out)["serve"]["models"]
    assert [model["name"] for model in models] == ["esm2_t6_8M_UR50D", "locations"]


def test_settings_that_can_not_be_end_with_one_line(command):
    for options, words in [
        ("", "missing: --serve.models; for example: esmeray serve run --serve.models"),
        ("--serve.models a b/a", "two have the same name"),
        ("--serve.models a:b", "should match pattern"),
        ("--serve.models a --serve.port 70000", "port"),
        ("--serve.models a --serve.access.keys none.yaml", "access.keys: none.yaml: is not a list of keys"),
        ("--config none.yaml", "none.yaml"),
    ]:
        assert command.refused(2, words, f"serve run {options}").out == ""


MESSAGE = """The deployment failed to start 3 times in a row. Error:
ray::ServeReplica:esmeray:none.initialize_and_get_metadata() (pid=1, ip=127.0.0.1)
  File "esmeray/service/replicas/replica.py", line 67, in __init__
common.errors.{error}"""


def test_a_replica_that_can_not_start_is_named_in_one_line():
    details = {"status": "DEPLOY_FAILED", "last_deployed_time_s": 0.0, "deployments": {}}
    for error, kind, words in [
        ("ConfigError: models none: there is no such folder", ConfigError, "models none: there is no such folder"),
        ("ResourceError: out of memory", ResourceError, "out of memory"),
        ("Something else", ConfigError, "models: can't be served"),
    ]:
        status = ApplicationStatusOverview(message=MESSAGE.format(error=error), **details)  # type: ignore[arg-type]
        found = deployment_error(status)
        assert type(found) is kind and words in str(found) and "\n" not in str(found)
