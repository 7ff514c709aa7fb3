"""Modules and files named in documentation, help, docstrings and comments exist."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import REPOSITORY

ROOMS = "|".join(sorted(path.parent.name for path in REPOSITORY.glob("esmeray/*/__init__.py")))
DOTTED = re.compile(rf"(?<![\w./@-])(esmeray\.(?:{ROOMS})(?:\.\w+)*)")
FILE = re.compile(
    r"(?<![\w./-])((?:esmeray|benchmarks|tests|docs|docker|requirements)/[\w./-]*\.(?:pyi?|md|cpp|lock|txt))"
)
ELSEWHERE = {"docs/docs/models/amplify.md"}
"""Files of other repositories."""


def texts() -> Iterator[tuple[str, str]]:
    """Yield each page and module with its text, except results, the changelog, and this file."""
    patterns = ["*.md", "*.py", "Makefile", "pyproject.toml", "docker", ".ci"]
    files = subprocess.check_output(["git", "ls-files", *patterns], cwd=REPOSITORY, text=True).split()
    for name in files:
        if not name.startswith(("benchmarks/results/", "CHANGELOG", "tests/test_names.py")):
            yield name, (REPOSITORY / name).read_text(encoding="utf-8")


def is_module(path: Path) -> bool:
    return path.is_dir() or any(path.with_suffix(suffix).is_file() for suffix in (".py", ".pyi"))


def exists(dotted: str) -> bool:
    """Test that a module, or a name in a module, exists."""
    parts = dotted.split(".")
    length = max(count for count in range(1, len(parts) + 1) if is_module(REPOSITORY.joinpath(*parts[:count])))
    path = REPOSITORY.joinpath(*parts[:length])
    sources = [
        file.read_text(encoding="utf-8") for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()
    ]
    return all(
        name.startswith("__") or re.search(rf"\b{name}\b", "\n".join(sources)) for name in parts[length : length + 1]
    )


def test_every_module_that_is_named_exists():
    assert not [(file, name) for file, text in texts() for name in DOTTED.findall(text) if not exists(name)]


def test_every_file_that_is_named_exists():
    # NAME stands for the name that a reader chooses: the folder has to exist.
    named = {(file, name.replace("/NAME.py", "")) for file, text in texts() for name in FILE.findall(text)}
    assert not [(file, name) for file, name in named if name not in ELSEWHERE and not (REPOSITORY / name).exists()]
