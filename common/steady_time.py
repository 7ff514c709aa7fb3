"""The time of day for records: no step of the system's clock, by NTP or by hand, changes it within a process.

Durations, order and the time left are made of these times. They advance in a machine that sleeps.
"""

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BEGAN_S = time.time() - time.clock_gettime(_CLOCK)


def steady_time() -> float:
    """Unix seconds: those of the system's clock when the process began, and what has passed since."""
    return _BEGAN_S + time.clock_gettime(_CLOCK)
