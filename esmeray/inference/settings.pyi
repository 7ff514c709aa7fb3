"""Settings of the public functions as keyword arguments, for editors and type checkers.

There is no such module when the program runs. tests/esmeray/test_api.py compares names and types with the sections of
settings, which have defaults, limits and what each setting means (docs/config.md).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

class AlignSettings(TypedDict, total=False):
    """Settings of :func:`esmeray.align`."""

    hits: int
    evalue: float
    matrix: str
    gap_open: int | None
    gap_extend: int | None
    prefilter: Literal["none", "kmer", "embedding"]
    candidates: int
    embeddings: Sequence[str | Path]
    device: Literal["cpu", "cuda"]

class BuildIndexSettings(TypedDict, total=False):
    """Settings of :func:`esmeray.build_index`."""

    kind: Literal["exact", "compressed"] | None
    metric: Literal["cosine", "dot", "l2"] | None
    name: str | None

class ChooseLayerSettings(TypedDict, total=False):
    """Settings of :func:`esmeray.choose_layer`."""

    device: str | None
    precision: Literal["fp32", "bf16", "fp16"]
    tokens: int | None
    retrieval: bool
    report: str | Path | None
    output: str | Path | None
    seed: int

class ClassifySettings(TypedDict, total=False):
    """Settings of :func:`esmeray.classify`."""

    coverage: float | None
    device: str | None
    precision: Literal["fp32", "bf16", "fp16"]
    tokens: int

class DesignSettings(TypedDict, total=False):
    """Settings of :func:`esmeray.design`."""

    label: str | None
    device: str | None
    tokens: int
    chains: str
    ca_only: Literal["error", "skip", "complete"]
    length: int | None
    number: int
    fix: str
    omit: str
    bias: str | Path | None
    tie: str
    temperature: float
    steps: int
    guidance: float
    seed: int
    known: str | Path | None

class EvaluateSettings(TypedDict, total=False):
    """Settings of :func:`esmeray.evaluate`."""

    device: str | None
    precision: Literal["fp32", "bf16", "fp16"]
    tokens: int
    output: str | Path | None
    part: Literal["all", "training", "validation", "test"] | None
    calibrate: bool
    baselines: bool

class FitMutantsSettings(TypedDict, total=False):
    """Settings of :func:`esmeray.fit_mutants`."""

    device: str | None
    precision: Literal["fp32", "bf16", "fp16"]
    tokens: int | None
    first_position: int
    method: Literal["wild_type", "masked", "pseudo"]
    max_length: int | None
    mutant_column: str | None
    sequence_column: str | None
    bad_mutants: Literal["error", "empty"]
    not_missing: Sequence[str]
    measured_column: str
    features: Literal["embeddings", "one_hot"]
    zero_shot_column: str | None
    seed: int
    folds: Sequence[Literal["random", "modulo", "contiguous", "rest"]]
    sizes: Sequence[int]
    groups: str | None

class PredictFunctionsSettings(TypedDict, total=False):
    """Settings of :func:`esmeray.predict_functions`."""

    format: Literal["cafa", "cafa6"]
    terms: int | None
    part: Literal["ranker", "blend", "naive", "homology", "neighbours", "network"]
    coverage: float | None

class ProposeSettings(TypedDict, total=False):
    """Settings of :func:`esmeray.propose`."""

    device: str | None
    number: int
    strategy: Literal["ei", "ucb", "thompson"]
    candidates: Sequence[Literal["singles", "combinations", "listed"]]
    mutations: int
    exclude_positions: Sequence[str]
    exclude_residues: str
    protein: str | None
    seed: int

class ScanSettings(TypedDict, total=False):
    """Settings of :func:`esmeray.scan`."""

    device: str | None
    precision: Literal["fp32", "bf16", "fp16"]
    tokens: int | None
    first_position: int
    method: Literal["wild_type", "masked", "pseudo"]
    max_length: int | None

class SearchSettings(TypedDict, total=False):
    """Settings of :func:`esmeray.search`."""

    top_k: int
    metric: Literal["cosine", "dot", "l2"] | None
    probes: int | None
    model: str | None
    name: str | None
    workers: int | None
    error_rate: float | None
    calibration: str | Path | None
    calibration_queries: str | Path | None
    calibration_level: int
    label_column: str
    not_missing: Sequence[str]
