"""Write docs/config.md from the schema."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.arguments import parse
from train_config.reference import config_reference

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"


@dataclass(frozen=True)
class ConfigDocs:
    """Write docs/config.md from the schema."""


def main(argv: list[str]) -> int:
    """Write the page."""
    parse(ConfigDocs, argv, "config_docs")
    PAGE.write_text(config_reference(), encoding="utf-8")
    print(PAGE)
    return 0
