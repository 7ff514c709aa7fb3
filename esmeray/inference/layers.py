"""Choose a model's layer for labelled records: vectors of all layers in one pass, and a linear probe on each.

The outer folds give each row a prediction by a probe that was not fitted to it. Within the training rows of each outer
fold, inner folds choose the penalty of each layer's probe, and the layer. The score of the choice therefore comes from
rows that had no part in it (Varma and Simon 2006). A split in the table takes the place of the outer folds.

Shape legend: N records, R rows (records, or sampled residues), L layers with the embeddings, D channels, K outer folds,
S resamplings.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from sklearn.linear_model import Ridge, RidgeClassifier
from sklearn.model_selection import GridSearchCV, PredefinedSplit
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.figure_style import BLUE, ORANGE, legend, picture, style_steps
from esmeray.common.progress import status_line
from esmeray.common.publishing import NOTES, made_folder, refuse_existing
from esmeray.common.statistics import RESAMPLINGS, SHARE, resamplings
from esmeray.dataset.labels.label_space import LabelSpace
from esmeray.dataset.labels.labelled_file import LabelledRecords, read_labelled
from esmeray.dataset.section import LabelsSection, TokenizerSection
from esmeray.dataset.sequence_list import checked_paths
from esmeray.dataset.targets import has_target
from esmeray.dataset.tokens.base import open_tokenizer
from esmeray.inference.embedding.section import LayersSection
from esmeray.inference.models.model import Model, TokenizedTexts, run
from esmeray.inference.models.opening import open_model
from esmeray.inference.models.source import ModelSource, check_model
from esmeray.model.backbones.huggingface_loading import save_first_layers
from esmeray.model.metrics.weighted import Correlation
from esmeray.train_config.section import overrides_of
from esmeray.training.config import load_config

if TYPE_CHECKING:
    from esmeray.inference.settings import ChooseLayerSettings

MADE_BY = "choose_layer"
SAMPLED_ROWS = 20_000
"""Maximum number of records or residues; more change the choice little, and probes take minutes per layer."""
FOLDS = 5
"""Number of outer folds, and of the inner folds in each."""


class LayerChoice(NamedTuple):
    """The layer of a model whose vectors predict the labels best.

    Attributes:
        layer: number of the layer, from 1.
        table: a row per layer, with the embeddings as layer 0. Columns: the metric on held-out records (accuracy, or
            spearman of numbers) with the ends of its 95 % interval, and ``inner``, the mean metric in the inner folds,
            whose maximum from layer 1 on is the choice. The last row, ``chosen``, is the score of the choice on records
            that had no part in it. ``attrs["notes"]`` are lines about what was changed, left out or sampled.
    """

    layer: int
    table: pd.DataFrame


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
        config: settings of the labels by the names of docs/config.md, such as ``data.labels.kind``.
        settings: others of the command: ``report`` and ``output``, folders to write to (by default nothing is written),
            ``retrieval``, ``seed``, ``device`` ...

    Raises EsmerayError for what the command refuses.

    >>> choice = esmeray.choose_layer("esm2", "families.csv", retrieval=True, device="cpu")
    >>> choice.table.index.tolist(), choice.table.columns.tolist()
    ([0, 1, 2, 'chosen'], ['accuracy', 'low', 'high', 'inner'])
    """
    section = LayersSection.of(input=checked_paths(input, "input"), **settings)
    for target in filter(None, (section.report, section.output)):
        refuse_existing(target, MADE_BY, overwrite)
    data = load_config(None, overrides_of(config)).data
    labels = data.labels
    refused_kinds = ("multilabel", "regression") if section.retrieval else ("multilabel",)
    if labels.kind in refused_kinds or len(labels.label_columns) > 1 or labels.split in ("stratified", "clusters"):
        raise ConfigError(
            f"data.labels: labels must be in one column, not of kind {' or '.join(refused_kinds)}, and split by column "
            "or files, or by default by folds"
        )
    source = check_model(model, random_weights=False)
    records = read_labelled(
        section.input, labels, TokenizerSection(), data.ingest, held_out_sources=labels.validation_source
    )
    opened = open_model(source, section.precision, section.device, heads=[])
    rows = rows_of(records, labels, opened, section.seed)
    with status_line("computing all layers") as status:
        vectors_LRD = layer_vectors(opened, records.texts, rows, opened.token_budget(section.tokens))
        choice = score_layers(vectors_LRD, rows, section.retrieval, section.seed, status)
    if section.report is not None:
        with made_folder(section.report.absolute(), MADE_BY, overwrite) as building:
            choice.table.to_csv(building / "layers.csv")
            draw(building / "layers.png", choice, f"Layers of {source.name}")
    if section.output is not None:
        with made_folder(section.output.absolute(), MADE_BY, overwrite) as building:
            write_cut(source, choice.layer, building)
            texts = [text[: opened.facts.longest] for text in records.texts[:4]]
            cut = open_model(building, section.precision, section.device, heads=[])
            if not np.array_equal(cut.embed(texts), opened.embed(texts, layer=choice.layer)):
                raise ConfigError(f"output: this architecture can't be cut; use --embed.layers {choice.layer} instead")
    return choice


def rows_of(records: LabelledRecords, labels: LabelsSection, model: Model, seed: int) -> pd.DataFrame:
    """Return the rows with a known label; ``attrs["notes"]`` are lines about the records.

    Columns: ``target``, a number or the number of a class; ``record``, ascending; ``offset``, the residue in its
    record; ``group``, a number in random order, whose rows no fold splits; and ``fold``, the outer fold that tests the
    row, -1 if a split of the records has it in training. Raises DataError if there is a single class.
    """
    space = LabelSpace.of(records.labels, labels.kind, labels.label_columns, labels.unknown_letters)
    targets = space.encode(records.labels, labels.unknown_letters)[0][:]
    known_R, targets_R = has_target(targets), targets.reshape(-1)
    lengths_N = [len(text) if labels.kind == "per_residue" else 1 for text in records.texts]
    rows = pd.DataFrame({"record": np.repeat(np.arange(len(records)), lengths_N), "target": targets_R})
    rows["offset"] = rows.groupby("record").cumcount()
    # Equal sequences are in one group, and groups that share a sequence are one: a probe must not be tested on what it
    # has learnt.
    texts_N = pd.factorize(pd.Series(records.texts))[0]
    groups_N = texts_N if records.groups is None else pd.factorize(pd.Series(records.groups))[0]
    size = len(texts_N)
    shared = coo_array((np.ones(size), (texts_N, size + groups_N)), shape=(2 * size, 2 * size))
    merged_N = pd.factorize(connected_components(shared, directed=False)[1][texts_N])[0]
    rows["group"] = np.random.default_rng(seed).permutation(merged_N.max() + 1)[merged_N[rows["record"]]]
    rows["fold"] = rows["group"] % FOLDS
    if records.parts is not None:
        rows["fold"] = np.where(np.array(records.parts) == "training", -1, 0)[rows["record"]]
    rows = rows[known_R & (rows["offset"] < (model.facts.longest or np.inf))]
    sampled = rows.sample(min(len(rows), SAMPLED_ROWS), random_state=seed).sort_index()
    used = f"{len(records):,} records, {len(sampled):,} of {len(rows):,} labels used: {space}"
    unknown = model.facts.unknown.report(records.texts)
    sampled.attrs[NOTES] = [used, *records.counts.lines(), *filter(None, [unknown])]
    return sampled


def layer_vectors(model: Model, texts: Sequence[str], rows: pd.DataFrame, tokens: int) -> list[NDArray[np.float32]]:
    """(R, D) of each layer, from one pass: vectors of the residues if any row has an offset, otherwise means."""
    outputs = model.outputs(["residues" if rows["offset"].any() else "mean"], range(model.facts.num_layers + 1))
    vectors_LRD = [np.empty((len(rows), output.channels), np.float32) for output in outputs]
    # Records without a sampled row are not computed.
    used, text_R = np.unique(rows["record"], return_inverse=True)
    offsets_R, rows_of_text = rows["offset"].to_numpy(), rows.groupby(text_R).indices
    tokenized = model.tokenize([texts[record] for record in used], model.facts.longest)
    for batch in run(model, TokenizedTexts(tokenized, model), outputs, tokens):
        for vectors_RD, output in zip(vectors_LRD, outputs, strict=True):
            for text, own in zip(batch.indices, batch.by_text(output), strict=True):
                chosen = rows_of_text[text]
                vectors_RD[chosen] = own.reshape(-1, output.channels)[offsets_R[chosen]]
    return vectors_LRD


def score_layers(
    vectors_LRD: Sequence[NDArray[np.float32]],
    rows: pd.DataFrame,
    retrieval: bool,
    seed: int,
    status: Callable[[str], None],
) -> LayerChoice:
    """Return the choice among the layers.

    ``retrieval``: predict the label of the nearest neighbour by cosine instead of fitting a probe. Raises DataError if
    there are too few groups for the folds, or no held-out rows.
    """
    # Training groups of the first fold; the others have as many.
    if rows["fold"].max() < 0 or rows["group"][rows["fold"] != 0].nunique() < FOLDS * (FOLDS - 1):
        raise DataError(
            f"choosing a layer needs {FOLDS * FOLDS} distinct sequences or groups in training, and held-out records if "
            "data.labels.split defines them"
        )
    targets_R = rows["target"].to_numpy()
    metric = "spearman" if targets_R.dtype.kind == "f" else "accuracy"
    ridge = Ridge() if metric == "spearman" else RidgeClassifier()
    probe: Any = Pipeline([("scale", StandardScaler()), ("ridge", ridge)])
    grid: dict[str, Any] = {"ridge__alpha": np.logspace(-1, 5, 7)}
    if retrieval:
        probe, grid = KNeighborsClassifier(1, metric="cosine"), {}
    outer = PredefinedSplit(rows["fold"])
    inner_R = rows["group"].to_numpy() // FOLDS % FOLDS
    inner_KL = np.zeros((outer.get_n_splits(), len(vectors_LRD)))
    # The last row holds the predictions of the layers that the inner folds choose.
    predicted_LR = np.zeros((len(vectors_LRD) + 1, len(rows)), targets_R.dtype)
    for fold, (train, test) in enumerate(outer.split()):
        for layer, vectors_RD in enumerate(vectors_LRD):
            status(f"fitting probes: fold {fold + 1} of {len(inner_KL)}, layer {layer} of {len(vectors_LRD) - 1}")
            search = GridSearchCV(
                probe,
                grid,
                scoring=lambda fitted, tried_RD, known_R: scores(fitted.predict(tried_RD), known_R)[0],
                cv=PredefinedSplit(inner_R[train]),
            )
            search.fit(vectors_RD[train], targets_R[train])
            inner_KL[fold, layer] = search.best_score_
            predicted_LR[layer, test] = search.predict(vectors_RD[test])
        # The embeddings, layer 0, are a baseline, which is no model to cut.
        predicted_LR[-1, test] = predicted_LR[1 + inner_KL[fold, 1:].argmax(), test]
    tested = np.flatnonzero(rows["fold"] >= 0)
    # Whole records are drawn, because residues of a protein are not independent.
    records_R = pd.factorize(rows["record"].iloc[tested])[0]
    drawn_SR = [drawn_N[records_R] for drawn_N in resamplings(records_R.max() + 1, RESAMPLINGS, seed)]
    scores_LS = np.array([scores(predicted_R[tested], targets_R[tested], drawn_SR) for predicted_R in predicted_LR])
    low_L, high_L = np.quantile(scores_LS[:, 1:], [(1 - SHARE) / 2, (1 + SHARE) / 2], axis=1)
    inner_L = inner_KL.mean(0)
    columns = {metric: scores_LS[:, 0], "low": low_L, "high": high_L, "inner": [*inner_L, np.nan]}
    table = pd.DataFrame(columns, pd.Index([*range(len(inner_L)), "chosen"], name="layer"))
    table.attrs = rows.attrs
    return LayerChoice(1 + int(inner_L[1:].argmax()), table)


def scores(predicted_R: NDArray, targets_R: NDArray, drawn_SR: Sequence[NDArray] = ()) -> list[float]:
    """Spearman's coefficient of numbers (0 if they are constant) or the accuracy of classes, and (S,) of resamplings.

    ``drawn_SR``: how often each row is drawn.
    """
    weights_SR: list[NDArray] = [np.ones(len(targets_R)), *drawn_SR]
    if targets_R.dtype.kind != "f":
        return [np.average(predicted_R == targets_R, weights=weights_R) for weights_R in weights_SR]
    correlation = Correlation(predicted_R, targets_R)
    return [np.nan_to_num(correlation(weights_R)["spearman"]) for weights_R in weights_SR]


def draw(path: Path, choice: LayerChoice, title: str) -> None:
    table = choice.table[:-1]
    score = table.iloc[:, 0]
    with picture(path, 7.0, 4.0, title) as figure:
        axes = figure.add_subplot()
        style_steps(axes)
        errors = score - table["low"], table["high"] - score
        axes.errorbar(table.index, score, errors, color=BLUE, marker="o", capsize=3, label="held-out, 95 %")
        axes.plot(table["inner"], "--", color=ORANGE, label=f"inner folds: layer {choice.layer} is best")
        axes.set(xlabel="layer (0: embeddings)", ylabel=score.name, xmargin=0.03)
        legend(axes, over_curves=True)


def write_cut(source: ModelSource, layer: int, folder: Path) -> None:
    """Write the layers up to this one and the tokenizer, without heads of a language model or task."""
    # In fp32 on the CPU, without fixed rows, a model has the weights of the file.
    whole = open_model(source, device="cpu", heads=[], equal_bytes=False, stream=False)
    save_first_layers(whole.backbone, layer, folder)
    is_own = whole.backbone.residue_ids is None  # otherwise the model reads the ESM alphabet in place of its own ids
    (whole.tokenizer if is_own else open_tokenizer(source.path)).save(folder)
