"""Write docs/config.md from the schema."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from train_config.reference import config_reference

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"


@dataclass(frozen=True)
class ConfigDocs:
    """Write docs/config.md from the schema."""

    output: Path = PAGE
    """Where the page goes."""


def main(argv: list[str]) -> int:
    """Write the page."""
    options = tyro.cli(ConfigDocs, args=argv, prog="python -m tools config_docs")
    options.output.write_text(config_reference(), encoding="utf-8")
    print(options.output)
    return 0
