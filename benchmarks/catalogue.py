"""The stages by name, in the order in which data flows.

A stage is a module of :mod:`benchmarks.stages` with a ``STAGE``; a new one is a line here.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Sequence

from benchmarks.harness.stage import Stage
from common.errors import ConfigError

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


def stage_names() -> list[str]:
    """Names of all stages."""
    return [name for name in MODULES if importlib.util.find_spec(f"benchmarks.stages.{name}") is not None]


def load_stages(names: Sequence[str] = ()) -> list[Stage]:
    """The stages of these names in the catalogue's order; all of them if none is named.

    Raises:
        ConfigError: there is no such stage.
    """
    known = stage_names()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"no stage is called {name!r}; {hint}")
    chosen = [name for name in known if name in names or not names]
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
