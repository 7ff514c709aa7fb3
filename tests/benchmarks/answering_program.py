"""Stands for benchmarks.measuring_process: answers each line with a measurement, 100 tokens/s more than the last."""

from __future__ import annotations

import json
import sys
from pathlib import Path

config, store, settings, measurement, answers = sys.argv[1:]
with Path(answers).open("w", encoding="utf-8") as file:
    for number, _ in enumerate(sys.stdin, 1):
        speed = 100.0 * number if number < 3 else None
        print(json.dumps({"tokens_per_s": speed, "reason": "it crashed", "settings": settings}), file=file, flush=True)
