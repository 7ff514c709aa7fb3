"""Choose the layer of a model for a labelled table: one pass of all layers, a probe on each, and the cut model.

Shape legend: N records, R rows (records, or sampled residues), L layers including the embeddings, D channels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from esmeray.common.progress import record_bar
from esmeray.common.publishing import made_folder, refuse_existing
from esmeray.common.text import counted
from esmeray.dataset.sequence_list import checked_paths
from esmeray.inference.layers.labels import LabelledRows, read_task, rows_of
from esmeray.inference.layers.section import LayersSection
from esmeray.inference.models.source import check_model
from esmeray.train_config.section import overrides_of
from esmeray.training.config import load_config

if TYPE_CHECKING:
    import pandas as pd

    from esmeray.inference.layers.probes import Score
    from esmeray.inference.models.model import Model
    from esmeray.inference.settings import ChooseLayerSettings

MADE_BY = "choose_layer"
_COMPARED = 4
"""Number of sequences whose vectors by the cut model are compared with the whole model's."""


@dataclass(frozen=True)
class LayerChoice:
    """The layer of a model that suits labelled records best.

    Attributes:
        layer: number of the layer; 0 is the embeddings.
        metric: accuracy, or spearman for numbers.
        score: the metric on records that had no part in the choice, with its 95 % interval.
        table: a row per layer: its number, the metric on held-out records with its interval, and the mean metric in the
            inner folds, whose maximum is the choice.
        notes: lines about the records: the kind of labels, and what was changed, left out or sampled.
    """

    layer: int
    metric: str
    score: "Score"
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

    >>> choice = esmeray.choose_layer("esm2", "families.csv", device="cpu")
    >>> choice.layer in choice.table["layer"]
    True
    """
    section = LayersSection.of(input=checked_paths(input, "input"), **settings)
    for target in filter(None, (section.report, section.output)):
        refuse_existing(target, MADE_BY, overwrite)
    overrides = overrides_of(config)
    data = load_config(None, overrides).data
    source = check_model(model, random_weights=False)
    records, space = read_task(section, data, ("data", "labels", "kind") in overrides)
    from esmeray.inference.layers.probes import score_layers  # here: they load torch
    from esmeray.inference.models.opening import open_model
    from esmeray.model.device import choose_device

    device = section.device or str(choose_device())
    precision, tokens = section.resolved(device.startswith("cuda"))
    opened = open_model(source, precision, device, heads=[])
    rows = rows_of(records, space, data.labels.unknown_letters, opened.facts.longest, section.seed)
    vectors_LRD = _layer_vectors(opened, records.texts, rows, tokens)
    scores = score_layers(vectors_LRD, rows, section.retrieval, section.seed)
    import pandas as pd

    table = pd.DataFrame(scores.held_out).rename(columns={"value": scores.metric})
    table.insert(0, "layer", table.index)
    table["inner"] = scores.inner
    choice = LayerChoice(int(scores.inner.argmax()), scores.metric, scores.choice, table, rows.notes)
    if section.report is not None:
        with made_folder(section.report.absolute(), MADE_BY, overwrite) as building:
            table.to_csv(building / "layers.csv", index=False)
            _draw(building / "layers.png", choice, source.name)
    if section.output is not None:
        from esmeray.inference.layers.cutting import write_cut

        with made_folder(section.output.absolute(), MADE_BY, overwrite) as building:
            write_cut(opened, source, choice.layer, building, records.texts[:_COMPARED])
    return choice


def _layer_vectors(model: "Model", texts: Sequence[str], rows: LabelledRows, tokens: int) -> list[NDArray[np.floating]]:
    """(R, D) vectors of each layer, from one pass: means of the records, or vectors of the rows' residues."""
    from esmeray.inference.models.model import TokenizedTexts, run  # here: it loads torch

    rows.notes.extend(filter(None, [model.facts.unknown.report(texts)]))
    tokenized = model.tokenize(texts, model.facts.longest)
    cropped = np.count_nonzero(tokenized.cropped)
    if cropped:
        rows.notes.append(f"{counted(cropped, 'sequence{s}')} cropped to {model.facts.longest:,} residues, the maximum")
    kind = "residues" if rows.kind == "per_residue" else "mean"
    outputs = model.outputs([kind], range(model.facts.num_layers + 1))
    vectors_LRD = [np.empty((len(rows.targets), output.channels), np.float32) for output in outputs]
    # Rows of text i are bounds[i] to bounds[i + 1].
    bounds = np.searchsorted(rows.records, np.arange(len(texts) + 1))
    done = 0
    with record_bar("computing all layers") as bar:
        for batch in run(model, TokenizedTexts(tokenized, model), outputs, tokens):
            for vectors_RD, output in zip(vectors_LRD, outputs, strict=True):
                for text, own in zip(batch.indices, batch.by_text(output), strict=True):
                    chosen = slice(bounds[text], bounds[text + 1])
                    vectors_RD[chosen] = own.reshape(-1, output.channels)[rows.offsets[chosen]]
            done += len(batch.indices)
            bar(done / len(texts), done)
    return vectors_LRD


def _draw(path: Path, choice: LayerChoice, name: str) -> None:
    from esmeray.common.figure_style import BLUE, ORANGE, legend, picture, style_steps  # here: it loads Matplotlib

    table, layers = choice.table, choice.table["layer"]
    scores = table[choice.metric]
    with picture(path, 7.0, 4.0, f"Layers of {name}") as figure:
        axes = figure.add_subplot()
        style_steps(axes)
        errors = (scores - table["low"], table["high"] - scores)
        axes.errorbar(layers, scores, errors, color=BLUE, marker="o", capsize=3, label="held-out, 95 % interval")
        axes.plot(layers, table["inner"], "--", color=ORANGE, label="inner folds, which choose")
        axes.axvline(choice.layer, color=ORANGE, alpha=0.4, label=f"chosen: layer {choice.layer}")
        axes.set(xlabel="layer (0: embeddings)", ylabel=choice.metric)
        legend(axes, over_curves=True)
