"""Settings that are searched: read from a config, put into another, refused where they do not go together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError
from tests.runs import tiny_config
from tuning.settings import Settings


def test_settings_of_the_applied_config_are_the_settings():
    settings = Settings(
        tokens=512,
        batch_size=7,
        num_workers=2,
        prefetch=3,
        amp_dtype="bf16",
        gradient_checkpointing=True,
        compile=True,
        stage=1,
        workers=4,
    )
    config = tiny_config(Path("unused"), batch={"global_tokens": 1024})
    kept = settings.applied(config, keep_global_tokens=True)
    assert Settings.of(kept, kept.ray.num_workers) == settings
    assert kept.batch.global_tokens == 1024
    assert settings.applied(config, keep_global_tokens=False).batch.global_tokens == 4 * 512
    assert Settings.of(config, 1).stage == 2, "that of DeepSpeed's file"


def test_settings_that_do_not_go_together_are_refused():
    settings = Settings.of(tiny_config(Path("unused")), 1)
    with pytest.raises(ConfigError, match=r"global_tokens \(512\) must be a multiple of tokens \(300\)"):
        replace(settings, tokens=300).applied(tiny_config(Path("unused")), keep_global_tokens=True)
