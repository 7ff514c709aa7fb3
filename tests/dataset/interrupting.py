"""Ctrl-C at a line of one's choice."""

import sys
from collections.abc import Callable
from types import ModuleType


def interrupted_at(line: int, call: Callable[[], object], modules: tuple[ModuleType, ...] | None = None) -> bool:
    """Raise KeyboardInterrupt when ``call`` comes to its ``line``-th line of Python; whether it came so far.

    Args:
        line: counts from 1 and as lines are run, in every function called.
        call: what to interrupt.
        modules: count only their lines; default everything's, the standard library's included.
    """
    files = None if modules is None else {module.__file__ for module in modules}
    passed = 0

    def trace(frame, event, _argument):
        nonlocal passed
        if files is not None and frame.f_code.co_filename not in files:
            return None
        passed += event == "line"
        if event == "line" and passed == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
