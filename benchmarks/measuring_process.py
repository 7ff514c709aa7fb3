"""Workers that measure a configuration as a throughput search does, once for each line that they are sent.

    python -m benchmarks.measuring_process CONFIG STORE SETTINGS MEASUREMENT ANSWERS

CONFIG is the experiment's YAML file; SETTINGS (:class:`tuning.settings.Settings`) and MEASUREMENT
(:class:`train_config.tune_schema.MeasurementSection`) are JSON. In: lines on stdin. Out: for each a line of the file
ANSWERS, the measurement as JSON. That file is there, empty, as soon as the workers run.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from train_config.loading import load_config
from train_config.tune_schema import MeasurementSection
from training.launch import cluster
from tuning.pool import MeasuringPool
from tuning.settings import Settings


def main(config_path: str, store: str, settings_json: str, measurement_json: str, answers_path: str) -> None:
    """Measure until stdin ends."""
    config, settings = load_config(config_path, []), Settings(**json.loads(settings_json))
    measurement = MeasurementSection.model_validate_json(measurement_json)
    with cluster.connected(config.ray), MeasuringPool(config, Path(store)) as pool:
        pool.start(settings.workers)
        with Path(answers_path).open("w", encoding="utf-8") as answers:
            for _ in sys.stdin:
                print(json.dumps(asdict(pool.measure(settings, measurement))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
