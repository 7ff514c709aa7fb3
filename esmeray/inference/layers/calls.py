"""Choose the layer of a model for labelled records: all layers in one pass, a probe on each, and the cut model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from pydantic import Field

from esmeray.common.errors import ConfigError
from esmeray.common.publishing import made_folder, refuse_existing
from esmeray.dataset.labels.labelled_file import LabelledRecords, read_labelled
from esmeray.dataset.section import DataSection, LabelsSection, TargetKind, TokenizerSection
from esmeray.dataset.sequence_list import checked_paths
from esmeray.inference.models.source import check_model
from esmeray.train_config.section import ComputeSection, NonNegativeInt, overrides_of
from esmeray.training.config import load_config

if TYPE_CHECKING:
    import pandas as pd

    from esmeray.inference.settings import ChooseLayerSettings

MADE_BY = "choose_layer"
_CLASS_SIZE = 5
"""Minimum mean number of records per class. Labels with fewer are ids, families or measurements."""
_MEASUREMENTS = 20
"""Minimum number of distinct whole numbers that are measurements. Fewer may be classes."""
_COMPARED = 4
"""Number of sequences whose vectors are computed by the cut model and compared."""


class LayersSection(ComputeSection):
    """Labelled records and outputs, and how the model runs."""

    input: list[str] = Field(min_length=1)
    """Labelled files, folders or quoted globs: CSV, TSV, Parquet or FASTA."""
    retrieval: bool = False
    """Score a layer by the label of the nearest neighbour instead of a probe, e.g. for families with few records."""
    report: Path | None = None
    """Folder for layers.csv and layers.png. Default: layers-INPUT in the current folder."""
    output: Path | None = None
    """Folder for the model cut at the chosen layer. Default: none."""
    seed: NonNegativeInt = 0
    """Random seed of folds, sampled residues and intervals."""


@dataclass(frozen=True)
class LayerChoice:
    """The layer of a model whose vectors predict the labels best.

    Attributes:
        layer: number of the layer, from 1.
        metric: accuracy; spearman for numbers.
        score: the metric on records that had no part in the choice, and the ends of its 95 % interval.
        table: a row per layer, with the embeddings as layer 0: its number, the metric on held-out records with its
            interval, and the mean metric in the inner folds, whose maximum from layer 1 on is the choice.
        notes: lines about the labels, and about what was changed, left out or sampled.
    """

    layer: int
    metric: str
    score: tuple[float, float, float]
    table: "pd.DataFrame" = field(repr=False)
    notes: list[str] = field(repr=False)


def choose_layer(
    model: str | Path,
    input: str | Path | Sequence[str | Path],
    *,
    overwrite: bool = False,
    config: Mapping[str, Any] | None = None,
    **settings: "Unpack[ChooseLayerSettings]",
) -> LayerChoice:
    """Choose the layer of a model whose vectors predict labels best, as ``esmeray embed layers``.

    Args:
        model: a model, as :func:`esmeray.open_model` takes it.
        input: labelled files, folders or globs, or URIs.
        overwrite: replace outputs of an earlier call.
        config: settings of the labels by the names of docs/config.md, such as ``data.labels.label_columns``.
        settings: others of the command: ``report`` and ``output``, folders to write to (by default nothing is written),
            ``retrieval``, ``seed``, ``device`` ...

    Raises EsmerayError for what the command refuses.

    >>> choice = esmeray.choose_layer("esm2", "families.csv", retrieval=True, device="cpu")
    >>> choice.table["layer"].tolist(), choice.metric
    ([0, 1, 2], 'accuracy')
    """
    section = LayersSection.of(input=checked_paths(input, "input"), **settings)
    for target in filter(None, (section.report, section.output)):
        refuse_existing(target, MADE_BY, overwrite)
    source = check_model(model, random_weights=False)
    data = load_config(None, overrides_of(config)).data
    # Read as names first, because they tell the kind. The reader then checks each label.
    records, labels = _read(section, data, data.labels), data.labels
    if not (section.retrieval or "data.labels.kind" in (config or {})):
        labels = labels.model_copy(update={"kind": told_kind([*map(str, records.labels)], records.texts)})
        records = _read(section, data, labels)
    from esmeray.inference.layers import probes  # here: they load torch
    from esmeray.inference.models.opening import open_model
    from esmeray.model.device import choose_device

    device = section.device or str(choose_device())
    precision, tokens = section.resolved(device.startswith("cuda"))
    opened = open_model(source, precision, device, heads=[])
    if not opened.facts.num_layers:
        raise ConfigError(f"model {model}: has no layers to choose from")
    rows, notes = probes.rows_of(records, labels, opened, section.seed)
    vectors_LRD = probes.layer_vectors(opened, records.texts, rows, tokens)
    choice = LayerChoice(*probes.score_layers(vectors_LRD, rows, section.retrieval, section.seed), notes)
    if section.report is not None:
        with made_folder(section.report.absolute(), MADE_BY, overwrite) as building:
            choice.table.to_csv(building / "layers.csv", index=False)
            probes.draw(building / "layers.png", choice.table, choice.layer, source.name)
    if section.output is not None:
        from esmeray.inference.layers.cutting import write_cut

        with made_folder(section.output.absolute(), MADE_BY, overwrite) as building:
            write_cut(source, choice.layer, building)
            few = [text[: opened.facts.longest] for text in records.texts[:_COMPARED]]
            cut = open_model(building, precision, device, heads=[])
            if not np.array_equal(cut.embed(few), opened.embed(few, layer=choice.layer)):
                raise ConfigError(f"output: this architecture can't be cut; use --embed.layers {choice.layer} instead")
    return choice


def told_kind(labels: Sequence[str], texts: Sequence[str]) -> TargetKind:
    """Return the kind of labels that the labels tell. Raises ConfigError if they may be of several kinds."""
    # Most, because the reader removes a final '*'; it refuses labels of other lengths.
    if np.mean([len(label) == len(text) for label, text in zip(labels, texts, strict=True)]) > 0.5:
        return "per_residue"
    import pandas as pd

    distinct = pd.Series(labels).drop_duplicates()
    numbers = pd.to_numeric(distinct, errors="coerce")
    is_number = bool(numbers.notna().all())
    if is_number and ((numbers % 1).any() or len(numbers) >= _MEASUREMENTS):
        return "regression"
    if is_number or len(distinct) * _CLASS_SIZE > len(labels):
        raise ConfigError(
            f"data.labels: {len(distinct):,} distinct labels in {len(labels):,} records, such as {distinct[0]!r:.40}, "
            "may be classes, measurements or families; give --data.labels.kind multiclass or regression, or "
            "--layers.retrieval true"
        )
    return "multiclass"


def _read(section: LayersSection, data: DataSection, labels: LabelsSection) -> LabelledRecords:
    if labels.kind == "multilabel" or len(labels.label_columns) > 1:
        raise ConfigError("data.labels: the labels must be in one column, and not multilabel")
    held_out = labels.validation_source
    return read_labelled(section.input, labels, TokenizerSection(), data.ingest, held_out_sources=held_out)
