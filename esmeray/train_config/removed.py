"""Settings of earlier versions that are constants now.

Runs, exports, fitted models and files of settings that were written before still name them. ``Section`` applies this
list to whatever it is built from. A line stays as long as such files may exist.
"""

import json
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

REMOVED: Mapping[str, Mapping[str, Any]] = {
    "AlignSection": {"header": False, "threads": None},
    "AutoencoderSection": {"cosine_loss_weight": 0.0, "feature_loss_weight": 1.0, "residue_loss_weight": 1.0},
    "BatchSection": {"packing_window": 2048},
    "CheckpointSection": {"asynchronous": True, "keep_best": 1, "memory_every_steps": None, "memory_limit_gib": None},
    "ClassifierSection": {"bootstrap": 1000, "focal_gamma": 2.0, "loss": "auto"},
    "ComputeSection": {"stream": "auto", "weights": "stored"},
    "DataSection": {"prefetch": 4},
    "DeepSpeedSection": {"config": "train_config/zero2.yaml"},
    "DesignEvaluateSection": {"steps": 20},
    "DeviceProfileSection": {"random_weights": False},
    "EmbedJobSection": {"cpus_per_worker": 1, "stage_dir": None},
    "EmbeddingAssumptions": {"compressed_queries_per_s": 1200.0, "exact_products_per_s": 2.8e10, "peak_tflops": None},
    "EmbeddingPlanSection": {"cores": 16, "dtype": "fp16", "json_output": None, "precision": "bf16"},
    "EmbeddingsSection": {"random_weights": False},
    "EvaluationSection": {"draws": 1000, "seed": 0},
    "FitSection": {"channels": 512, "features": 2048},
    "FoldSection": {"cpus_per_worker": 1, "gpus_per_worker": 1.0, "max_failures": 3, "predictor_module": []},
    "GenerateSection": {"order": "confidence"},
    "IndexSection": {"lists": None},
    "IngestSection": {"max_residues": 1_000_000},
    "LabelsSection": {"weight_column": None},
    "LimitsSection": {"bodies_bytes": 64_000_000, "body_s": 20.0, "requests": 512},
    "LoraSection": {"dropout": 0.0},
    "MeasurementSection": {"agreement": 0.03, "max_windows": 6, "warmup_steps": 2},
    "ModelProfileSection": {"random_weights": False, "runs": 20, "token_budgets": [], "warmup_runs": 3},
    "MonitoringSection": {
        "alerts": {"enabled": True, "memory_percent": 95.0, "utilization_percent": 50.0, "utilization_window_s": 120.0},
        "prometheus": True,
    },
    "MuonSection": {"momentum": 0.95, "momentum_warmup_steps": 300, "warmup_momentum": 0.85},
    "MutantTableSection": {"bootstrap": 1000, "more_tables": []},
    "MutationCampaignSection": {"top_share": 0.01},
    "MutationFitSection": {"bootstrap": 100},
    "MutationProposeSection": {"precision": None, "tokens": None},
    "MutationScanSection": {"more_models": []},
    "MutationsSection": {"random_weights": False},
    "PlanAssumptions": {
        "host_gb_per_s": 6.0,
        "jitter": 0.01,
        "link_gb_per_s": None,
        "memory_gb": None,
        "memory_gb_per_s": None,
        "memory_reserve": 0.1,
        "mtbf_gpu_hours": 49_000.0,
        "network": 0.8,
        "overlap": 0.8,
        "peak_tflops": None,
        "restart_s": 180.0,
        "storage_gb_per_s": 5.0,
    },
    "PlanSection": {"gpus_per_node": 8, "precision": "bf16", "tokens": None, "total_tokens": 1e12},
    "PlotSection": {"id_column": "id"},
    "PredictionsSection": {
        "cpus_per_worker": 0,
        "gpus_per_worker": 1.0,
        "predictor_module": [],
        "tokens": 1024,
        "workers": 1,
    },
    "QuerySection": {"concurrency": 8},
    "RaySection": {"dashboard_port": None},
    "RetrievalSection": {"bootstrap": 1000},
    "SampleSection": {"seed": 0},
    "SearchSection": {"algorithm": "tpe", "cpus_per_worker": 1, "prune_margin": 0.15, "seed": 0},
    "SpaceSection": {"compile": None, "gradient_checkpointing": None, "prefetch": None, "stage": None},
    "StructuresSection": {"max_atoms": 5_000_000, "max_bytes": 1_000_000_000, "min_residues": 10},
    "TermsSection": {
        "homology": {"candidates": 500, "max_evalue": 1e-3},
        "neighbours": {"number": 10, "temperature": 0.05},
    },
    "TokenizerSection": {"source": "auto", "spaced": "auto"},
    "TrainingSection": {
        "checksum_every_steps": None,
        "cudnn_benchmark": False,
        "deterministic": False,
        "eps": 1e-8,
        "log_every_steps": 1,
        "max_nonfinite_steps": 5,
        "max_rewinds": 3,
        "memory_guard": {"enabled": True, "max_halvings": 3},
        "tf32": True,
    },
    "TuneConfig": {"inference": False},
}
"""Former defaults, which are the values now, by the section's class (or a base class of it) and the setting's name."""

_STORED = "stored"


def stored_in(file: Path | None) -> dict[str, Any]:
    """Return pydantic's validation context for a file of a run or an export, whose removed settings may have any value;
    None is a file of a user."""
    return {_STORED: file}


@cache
def removed_settings(section: type) -> Mapping[str, Any]:
    """Return the former defaults of the settings that a section had, by their names."""
    bases = reversed(section.__mro__)  # so that a section's own default overrides the one of its base class
    former = {name: value for base in bases for name, value in REMOVED.get(base.__name__, {}).items()}
    return {name: value for name, value in former.items() if name not in getattr(section, "model_fields", {})}


def without_removed(section: type, values: dict[str, Any], context: dict[str, Any] | None) -> dict[str, Any]:
    """Drop the removed settings that have their former default, and with a warning all of a stored file.

    Others stay, for the section to refuse them.
    """
    former, stored = removed_settings(section), (context or {}).get(_STORED)
    changed = {name: value for name, value in values.items() if name in former and not _is(value, former[name])}
    if changed and stored:
        now = {name: former[name] for name in changed}
        _warn(f"{stored}: settings that were removed are ignored: {changed}; their values are now {now}")
    kept = {} if stored else changed
    return {name: value for name, value in values.items() if name not in former or name in kept}


def removal_of(section: type, name: str) -> str | None:
    """Return what a message says of a removed setting; None for other names."""
    former = removed_settings(section)
    return f"was removed; its value is now {json.dumps(former[name])}" if name in former else None


def _is(value: Any, former: Any) -> bool:
    if isinstance(former, str) and former.endswith(".yaml"):
        # The path is absolute in the file of a run. A file that exists is the user's own.
        return isinstance(value, str) and value.endswith(former) and not Path(value).exists()
    # A file may name a part of the settings of a removed section.
    return bool(value == former or (isinstance(former, dict) and isinstance(value, dict) and former | value == former))


_warn = cache(log.warning)
"""Warn once of a text, since a run's file is opened several times."""
