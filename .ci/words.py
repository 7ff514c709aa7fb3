"""Plain English: report words of words.txt and docstrings that begin with a headless fragment; exit code 1 for any.

``python .ci/words.py PATH ...`` reads the Python files and pages of git below these paths: docstrings, comments and
messages of modules, and pages without their blocks of code.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

LIST = Path(__file__).with_name("words.txt")
ROWS = [line.split("\t") for line in LIST.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
SPACE = r"[\s#]+"  # a phrase may go on in the next line of a comment
WORDS = {re.compile(rf"\b{SPACE.join(words.split())}\b", re.IGNORECASE): advice for words, advice in ROWS}
HEADLESS = re.compile(r"(Of|By|That of|As|Those|What|Whether)\b")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
BLOCK = re.compile(r"^```.*?^```$|^    [^\n]*$", re.MULTILINE | re.DOTALL)


def prose(file: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each docstring, comment and string of a module, or of a page."""
    if not file.endswith(".py"):
        yield 1, BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            yield token.start[0], token.string


def problems(file: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the description of each listed word and headless docstring."""
    text = Path(file).read_text(encoding="utf-8")
    for start, piece in prose(file, text):
        for pattern, advice in WORDS.items():
            for match in pattern.finditer(piece):
                yield start + piece.count("\n", 0, match.start()), f"{match[0]!r}: {advice}"
    nodes = ast.walk(ast.parse(text)) if file.endswith(".py") else ()
    for node in nodes:
        if isinstance(node, DOCUMENTED) and HEADLESS.match(ast.get_docstring(node) or ""):
            yield node.body[0].lineno, "a docstring opens with a noun phrase or an imperative"


if __name__ == "__main__":
    patterns = [f"{path}/{suffix}" for path in sys.argv[1:] for suffix in ("*.py", "*.md")] + sys.argv[1:]
    files = subprocess.check_output(["git", "ls-files", *patterns], text=True).split()
    found = [(file, *problem) for file in files if file.endswith((".py", ".md")) for problem in problems(file)]
    for file, line, problem in found:
        print(f"{file}:{line}: {problem}")
    sys.exit(bool(found))
