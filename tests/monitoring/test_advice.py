"""Advice names what limits with its number, offers settings that exist, and none that were tried."""

from dataclasses import replace

from esmeray.monitoring.advice import RULES, Facts, advise, what_limits
from esmeray.training.config import Config

STEP = Facts(data_wait=0.01, forward=0.3, backward=0.6, optimizer=0.05, communication=0.02)


def _topics(facts: Facts) -> list[str]:
    return [advice.topic for advice in advise(facts)]


def test_waiting_for_batches_limits_and_says_by_how_much():
    found = what_limits(Facts(data_wait=0.2, forward=0.3, backward=0.4))
    assert found is not None and found.topic == "loading"
    assert "20% of a step" in found.finding and "25% faster" in found.finding
    assert found.actions[0].key == "data.num_workers"


def test_memory_limits_only_while_speed_still_rises_with_the_budget():
    rising = Facts(forward=0.3, backward=0.6, memory_limits=True, rise=0.1, tokens=4096)
    flat = Facts(forward=0.3, backward=0.6, memory_limits=True, rise=0.0, tokens=4096)
    assert "4,096 tokens" in str(what_limits(rising)) and "10%" in str(what_limits(rising))
    assert [found.topic for found in (what_limits(rising), what_limits(flat)) if found] == ["memory", "compute"]


def test_settings_that_are_on_or_were_tried_are_not_offered():
    off = Facts(forward=0.3, backward=0.6, precision="fp32", compile=False)
    on = replace(off, precision="bf16", compile=True)
    tried = replace(off, tried=frozenset({"training.precision"}))
    assert [[action.key for action in found.actions] for found in map(what_limits, (off, on, tried)) if found] == [
        ["training.precision", "training.compile", "ray.num_workers"],
        ["ray.num_workers"],
        ["training.compile", "ray.num_workers"],
    ]


def test_advice_is_ordered_by_cost():
    assert _topics(Facts(idle=0.1, utilisation=0.4, memory=0.3)) == ["utilisation", "idle", "memory unused"]


def test_every_setting_that_is_offered_exists():
    keys = {action.key for rule in RULES.values() for action in rule.actions if action.key}
    for key in keys:
        section: object = Config
        for part in key.split("."):
            section = section.model_fields[part].annotation
