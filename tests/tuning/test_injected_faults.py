"""Faults on purpose: of which settings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tuning.injected_faults import Faults


def test_faults_are_of_the_settings_that_they_name():
    faults = Faults({"tokens>=1024 and workers==2": "crash", "compile==true": "hang", "amp_dtype==bf16": "nan"})
    settings = SimpleNamespace(tokens=1024, workers=2, compile=False, amp_dtype="none")
    assert faults.of(settings) == "crash"
    settings.workers = 1
    assert faults.of(settings) is None
    settings.amp_dtype = "bf16"
    assert faults.of(settings) == "nan"
    settings.compile = True
    assert faults.of(settings) == "hang"
    with pytest.raises(ValueError, match="'explosion' is no fault"):
        Faults({"tokens>1": "explosion"})
