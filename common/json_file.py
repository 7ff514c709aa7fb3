"""JSON files that may be damaged, or made by others to do harm: read as data, or refused in one line."""

import json
from pathlib import Path
from typing import Any

from esmeray.common.errors import parsing


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The dictionary of a JSON file. Raises DataError, with the remedy, where it can't be read or is none."""
    with parsing(path, remedy):
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):  # else each reader would fail in its own way at the first key
            raise ValueError(f"a {type(content).__name__} where a dictionary belongs")
    return content
