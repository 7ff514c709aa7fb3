"""The stages by name, in the order in which data flows.

A stage is a module of :mod:`benchmarks.stages` with a ``STAGE``; a new one is a line here.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

from benchmarks.harness.stage import Stage
from common.errors import ConfigError
from common.text import did_you_mean

MODULES = (
    "conversion",
    "loading",
    "tokenizer",
    "embedding",
    "memory",
    "training",
    "monitoring",
    "features",
)
"""Importing one loads neither torch nor a peer, so that --list and --help answer at once."""


def load_stages(names: Sequence[str] = ()) -> list[Stage]:
    """The stages of these names in the catalogue's order; all of them if none is named.

    Raises:
        ConfigError: there is no such stage.
    """
    for name in names:
        if name not in MODULES:
            raise ConfigError(
                f"no stage is called {name!r}{did_you_mean(name, MODULES)}; there are {', '.join(MODULES)}"
            )
    chosen = [name for name in MODULES if name in names or not names]
    return [importlib.import_module(f"benchmarks.stages.{name}").STAGE for name in chosen]


def require_packages(stages: Sequence[Stage]) -> None:
    """Refuse to start where a peer is not installed.

    Raises:
        ConfigError: the first that is missing.
    """
    for stage in stages:
        for package in stage.packages:
            if importlib.util.find_spec(package) is None:
                raise ConfigError(f"stage {stage.name} needs the package {package}: 'make bench' installs the peers")
