"""Advice is ordered by its benefit, and every setting in it exists."""

from esmeray.monitoring.advice import RULES, Facts, advise
from esmeray.training.config import Config


def test_advice_is_ordered_by_cost():
    topics = [advice.topic for advice in advise(Facts({"idle": 0.1, "utilisation": 0.4, "memory": 0.3}))]
    assert topics == ["utilisation", "idle", "memory unused"]


def test_every_setting_that_is_offered_exists():
    keys = {action.key for rule in RULES.values() for action in rule.actions if action.key}
    for key in keys:
        section: object = Config
        for part in key.split("."):
            assert part in section.model_fields, key
            section = section.model_fields[part].annotation
