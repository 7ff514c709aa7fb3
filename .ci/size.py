"""Size of the tree beside its limits: lines, rooms, functions, imports. Exit code 1 where a limit is exceeded.

Code is lines without blank ones, comments and docstrings; a function's length is its lines from ``def`` to its end.
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

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(file: str, text: str) -> int:
    if not file.endswith(".py"):
        return sum(bool(line.strip()) and not line.lstrip().startswith("//") for line in text.splitlines())
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):  # docstrings, and those below a setting
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, int(node.end_lineno or 0) + 1))
    return len(lines)


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


def measure() -> Iterator[tuple[str, float, float, str]]:
    """Yield name, value, limit and a note of each count."""
    files = subprocess.check_output(["git", "ls-files", "*.py", "*.cpp"], text=True).split()
    texts = {file: Path(file).read_text(encoding="utf-8") for file in files if Path(file).is_file()}
    ours = {file: text for file, text in texts.items() if not file.startswith("tests/")}
    lines = sum(text.count("\n") for text in ours.values())
    yield "lines outside tests", lines, 49_400, ""
    yield "lines of code outside tests", sum(code_lines(*item) for item in ours.items()), 33_855, ""
    yield "lines of tests", sum(text.count("\n") for text in texts.values()) - lines, 28_600, ""
    trees = {file: ast.parse(text) for file, text in ours.items() if file.endswith(".py")}
    folders = Counter(str(Path(file).parent) for file in trees if not file.endswith("__init__.py"))
    folder, modules = folders.most_common(1)[0]
    yield "modules of the largest folder", modules, 15, f"{folder}, of {len(folders)} folders"
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
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
    yield "functions that take the whole Config", sum(map(takes_config, functions)), 20, ""
    inside = {node for function in functions for node in ast.walk(function)}
    late = sum(node in inside for statements in imports.values() for node in statements)
    yield "own modules imported inside functions", late, 150, ""


if __name__ == "__main__":
    counts = list(measure())
    for name, value, limit, note in counts:
        exceeded = "EXCEEDED" if value > limit else ""
        print(f"{name:<39}{value:>9,g}   at most {limit:>7,g}   {exceeded:<8}   {note}".rstrip())
    sys.exit(any(value > limit for _, value, limit, _ in counts))
