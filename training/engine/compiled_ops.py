"""Where DeepSpeed compiles its operators: a folder that no killed compilation leaves locked.

PyTorch marks a folder in which it compiles with a file, and waits for ever for a file whose owner was killed. Here each
Python environment and processor has a folder of its own (others would compile the same again, since the paths in it
differ), and who is in it holds a lock that the kernel takes back from a killed process: a mark that is found under the
lock has no owner any more.

Compiled is with the tools of the Python environment, as if it were activated: a build of ninja 1.13 is out of date to
the system's ninja 1.11 and the other way round, and all would be compiled again whenever the two take turns.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from common.compiled_code import cache_folder, processor
from common.publishing import exclusive

_VARIABLE = "TORCH_EXTENSIONS_DIR"
_MARK = "lock"
"""What PyTorch calls its file (torch.utils.cpp_extension, torch 2.13)."""

_LOG = logging.getLogger(__name__)


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Nobody else compiles DeepSpeed's operators on this machine while the block lasts; wait for who does.

    A folder that the user chose by TORCH_EXTENSIONS_DIR is left as it is.
    """
    if os.environ.get(_VARIABLE):
        yield
        return
    folder = cache_folder("operators") / _environment()
    with exclusive(folder):
        for mark in folder.glob(f"*/{_MARK}"):
            _LOG.warning("%s: left by a compilation that was killed; removed", mark)
            mark.unlink()
        path = os.environ.get("PATH", os.defpath)
        os.environ[_VARIABLE] = str(folder)
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.prefix) / "bin"), path])
        try:
            yield
        finally:
            del os.environ[_VARIABLE]
            os.environ["PATH"] = path


def _environment() -> str:
    parts = [sys.prefix, sys.version, version("torch"), version("deepspeed"), processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
