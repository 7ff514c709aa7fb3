import re

from esmeray.tools.reference import PAGE, command_schemas, config_reference
from esmeray.train_config.section import settings_of
from esmeray.training.config import Config
from esmeray.tuning.section import TuneConfig

FRAGMENT = re.compile(r"(Of|In|To|By|For|At|On|With|As|Its|Their|Default|The same)\b")
"""Beginnings of a help text that is only complete next to another setting's text."""


def test_every_setting_is_described_in_the_page():
    assert PAGE.read_text() == config_reference(), "run 'make docs'"
    for schema in (Config, TuneConfig, *command_schemas().values()):
        for key, field in settings_of(schema).items():
            text = field.description or ""
            assert len(text.split()) > 3 and not FRAGMENT.match(text), f"{key}: {text!r} says too little alone"
