"""Statements of the tree next to their limits, by room; exit code 1 if a limit is exceeded.

Statements are Python's, without docstrings: a comment, a blank line or a wrapped call costs nothing. Only an issue
moves a limit. ruff limits the complexity of functions and the number of their parameters
(pyproject.toml).
"""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

LIMITS = {"code": 32_270, "tests": 21_550}


def statements(tree: ast.AST) -> int:
    every = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return sum(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in every)


def main() -> int:
    rooms = Counter[str]()
    for file in subprocess.check_output(["git", "ls-files", "*.py"], text=True).split():
        # The folder in esmeray/, or at the top level.
        room = file.removeprefix("esmeray/").rpartition("/")[0].partition("/")[0] or "."
        rooms[room] += statements(ast.parse(Path(file).read_text(encoding="utf-8")))
    for room, count in sorted(rooms.items()):
        print(f"{room:<14}{count:>7,}")
    counts = {"tests": rooms["tests"], "code": rooms.total() - rooms["tests"]}
    for name, limit in LIMITS.items():
        print(f"{name:<14}{counts[name]:>7,}   at most {limit:,}")
    return any(counts[name] > limit for name, limit in LIMITS.items())


if __name__ == "__main__":
    sys.exit(main())
