"""Size of the tree beside its limits: statements of each room, comments, files, functions, imports.

Exit code 1 where a limit is exceeded.

Statements are those of Python's grammar without docstrings: a comment, a blank line or a wrapped call costs nothing, a
second thought on a line does. A function's length is its lines from ``def`` to its end. Only an issue moves a budget.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
BUDGETS = {
    ".": 15,
    ".ci": 90,
    "alignment": 237,
    "benchmarks": 3_297,
    "cluster": 676,
    "common": 1_251,
    "dataset": 5_851,
    "esmeray": 70,
    "function": 934,
    "inference": 5_720,
    "model": 2_544,
    "monitoring": 1_565,
    "run_folder": 720,
    "service": 2_246,
    "tasks": 1_807,
    "tests": 21_939,
    "tools": 2_347,
    "train_config": 263,
    "training": 2_454,
    "tuning": 1_201,
}
"""Statements of each room, and of the modules beside them (``.``)."""


def is_docstring(statement: ast.stmt) -> bool:
    """Test for a string that stands alone: of a module, a function, or below a setting."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def statements(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in ast.walk(tree))


def holds_two_thoughts(node: ast.AST) -> bool:
    """Test for a tuple assigned to a tuple, a walrus, or a condition within a condition or comprehension."""
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    if isinstance(node, COMPREHENSIONS | ast.IfExp):
        inner = (child for child in ast.walk(node) if child is not node)
        return any(isinstance(child, COMPREHENSIONS | ast.IfExp) for child in inner)
    return isinstance(node, ast.NamedExpr)


def code_and_comments(text: str, tree: ast.AST) -> tuple[int, int]:
    """Lines of code, docstrings and blank ones apart, and comments, on lines of their own or behind code."""
    documented = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and is_docstring(node)
        for line in range(node.lineno, int(node.end_lineno or 0) + 1)
    }
    lines = [line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in documented]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT and "noqa" not in token.string]
    return sum(bool(line) and not line.startswith("#") for line in lines), len(comments)


def imported(tree: ast.AST, modules: set[str]) -> Iterator[tuple[ast.AST, set[str]]]:
    """Each statement that imports modules of this tree, wherever it stands, with these modules."""
    for node in ast.walk(tree):
        names = set()
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        if names & modules:
            yield node, names & modules


def takes_config(function: FUNCTIONS) -> bool:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    annotations = [ast.unparse(argument.annotation) for argument in arguments if argument.annotation]
    return any("Config" in annotation.strip("'").split(" | ") for annotation in annotations)


def room_of(file: str) -> str:
    """The folder in esmeray/, or at the top level."""
    parts = file.removeprefix("esmeray/").split("/")
    return parts[0] if len(parts) > 1 else str(Path(file).parent)


def measure() -> Iterator[tuple[str, float, float, str]]:
    """Yield name, value, limit and a note of each count."""
    files = subprocess.check_output(["git", "ls-files", "*.py"], text=True).split()
    texts = {file: Path(file).read_text(encoding="utf-8") for file in files if Path(file).is_file()}
    every = {file: ast.parse(text) for file, text in texts.items()}
    rooms: Counter[str] = Counter()
    for file, tree in every.items():
        rooms[room_of(file)] += statements(tree)
    for room, count in sorted(rooms.items()):
        yield f"statements of {room}", count, BUDGETS.get(room, 0), ""
    in_tests = rooms.pop("tests")
    yield "statements outside tests", rooms.total(), sum(BUDGETS.values()) - BUDGETS["tests"], f"{in_tests:,} in tests"
    trees = {file: tree for file, tree in every.items() if room_of(file) != "tests"}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    yield "lines that hold two thoughts", sum(map(holds_two_thoughts, nodes)), 573, ""
    counts = [code_and_comments(texts[file], tree) for file, tree in trees.items()]
    code, comments = (sum(column) for column in zip(*counts, strict=True))
    yield "lines of code to a comment", code / comments, 100 / 6, f"{100 * comments / code:.1f} comments to 100 lines"
    longest = max(trees, key=lambda file: texts[file].count("\n"))
    yield "lines of the longest file", texts[longest].count("\n"), 450, longest
    folders = Counter(str(Path(file).parent) for file in trees if not file.endswith("__init__.py"))
    folder, modules = folders.most_common(1)[0]
    yield "modules of the largest folder", modules, 15, f"{folder}, of {len(folders)} folders"
    functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
    lengths = {node: int(node.end_lineno or 0) - node.lineno + 1 for node in functions}
    long = [node.name for node, length in lengths.items() if length > 70]
    yield "median length of functions", median(lengths.values()), 8, f"of {len(lengths)}"
    yield "functions over 70 lines", len(long), 0, ", ".join(long)
    names = {file: file.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for file in trees}
    imports = {file: dict(imported(tree, set(names.values()))) for file, tree in trees.items()}
    cycle: list[str] = []
    try:
        TopologicalSorter({names[file]: set().union(*imports[file].values()) for file in imports}).prepare()
    except CycleError as error:
        cycle = error.args[1]
    yield "modules in an import cycle", len(cycle), 0, " -> ".join(cycle)
    yield "functions that take the whole Config", sum(map(takes_config, functions)), 12, ""
    inside = {node for function in functions for node in ast.walk(function)}
    late = sum(node in inside for statements in imports.values() for node in statements)
    yield "own modules imported inside functions", late, 150, ""


if __name__ == "__main__":
    table = list(measure())
    for name, value, limit, note in table:
        exceeded = "EXCEEDED" if value > limit else ""
        print(f"{name:<39}{value:>9,g}   at most {limit:>7,g}   {exceeded:<8}   {note}".rstrip())
    sys.exit(any(value > limit for _, value, limit, _ in table))
