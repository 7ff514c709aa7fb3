"""Ctrl-C at a line of one's choice."""

import sys
from collections.abc import Callable
from types import ModuleType


def interrupted_at(line: int, call: Callable[[], object], modules: tuple[ModuleType, ...]) -> bool:
    """Raise KeyboardInterrupt when ``call`` comes to its ``line``-th line of these modules; whether it came so far.

    Lines are counted from 1 and as they are run.
    """
    files = {module.__file__ for module in modules}
    passed = 0

    def trace(frame, event, _argument):
        nonlocal passed
        if frame.f_code.co_filename not in files:
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
