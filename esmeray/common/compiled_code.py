"""Compile C++ sources on the machine that runs them, once, and cache the libraries.

If there is no compiler, one warning is logged and the caller uses a slower implementation. The sources include no torch
headers, so that they compile in seconds. They share OpenMP's threads with torch, whose library the loader finds.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from esmeray.common.own_folders import cache_folder
from esmeray.common.publishing import atomic_file

_LOG = logging.getLogger(__name__)

_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fPIC", "-shared", "-w")
_OPENMP_FLAGS = ("-fopenmp",)
_MACHINE_FLAGS = (("-march=native",), ("-mcpu=native",), ())
"""Machine flags from the fastest to the most portable; the first set that compiles is used."""


@functools.cache
def load(source: Path, *, openmp: bool = False, **constants: int) -> ctypes.CDLL | None:
    """Return the library compiled from a source with these macros, or None if it can't be compiled.

    Libraries are cached in ``esmeray/kernels`` in the user's cache folder, one per source, set of macros, compiler and
    processor: machines that share a home folder must not share machine code.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        _LOG.warning("no C++ compiler found, so %s uses slower Python code; install g++ or clang++", source.stem)
        return None
    try:
        library = cache_folder("kernels") / f"{source.stem}-{_fingerprint(source, compiler, openmp, constants)}.so"
        if not library.exists():
            _compile(compiler, source, library, openmp, constants)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        _LOG.warning("%s could not be compiled, so slower Python code is used: %s", source.name, _reason(error))
        return None


def _reason(error: Exception) -> str:
    lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    # Compilers print warnings and include paths first.
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else type(error).__name__)


def _fingerprint(source: Path, compiler: str, openmp: bool, constants: Mapping[str, int]) -> str:
    # Hash the text instead of the file's time, which every checkout changes.
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    parts = [
        source.read_text(encoding="utf-8"),
        version,
        processor(),
        repr((_FLAGS, openmp, sorted(constants.items()))),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def processor() -> str:
    """Processor model and flags, on which the machine code depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    # A set, since every core repeats the same lines.
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _compile(compiler: str, source: Path, library: Path, openmp: bool, constants: Mapping[str, int]) -> None:
    """Compile with the first set of flags that works; safe for several processes at once."""
    macros = [f"-D{name}={value}" for name, value in constants.items()]
    # All sets with OpenMP first, then without it: clang lacks the OpenMP library on many machines.
    tries = [(*flags, *_OPENMP_FLAGS) for flags in _MACHINE_FLAGS if openmp] + list(_MACHINE_FLAGS)
    with atomic_file(library) as partial:
        for number, flags in enumerate(tries, start=1):
            command = [compiler, *_FLAGS, *flags, *macros, str(source), "-o", str(partial)]
            last = number == len(tries)  # its failure is raised, with the compiler's message
            done = subprocess.run(command, capture_output=True, text=True, check=last, timeout=120)
            if done.returncode == 0:
                break
