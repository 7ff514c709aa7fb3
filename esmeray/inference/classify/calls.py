"""Predict and evaluate by a trained classifier as functions of Python: the work of the commands of these names.

What is wrong with the model's folder, the settings or the data is reported before torch is loaded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.publishing import grown_folder, made_folder, refuse_existing
from esmeray.dataset.fasta.records import hashes_of
from esmeray.dataset.section import Part
from esmeray.inference.classify.labelled import (
    TextPart,
    TextStream,
    own_texts,
    read_texts,
    sampled_identities,
    training_store,
    without_texts,
)
from esmeray.inference.models.source import config_of, exported_classifier
from esmeray.train_config.section import (
    DEFAULT_TOKENS,
    ComputeSection,
    Coverage,
    Overrides,
    PositiveInt,
    Precision,
    overrides_of,
)

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from esmeray.dataset.labels.store import LabelledStore
    from esmeray.inference.classifier import ClassifierPipeline
    from esmeray.inference.settings import ClassifySettings, EvaluateSettings

CHUNK_CHARACTERS = 4_000_000
"""Texts that are sorted and packed together: about 10,000 proteins."""
EVALUATED_BY = "evaluate"


class ClassifierRunSection(ComputeSection):
    """Settings with which a classifier runs."""

    precision: Precision = "fp32"
    """Precision of the computation."""
    tokens: PositiveInt = DEFAULT_TOKENS
    """Token budget of a batch; a longer text goes alone."""

    def options(self) -> dict[str, Any]:
        """Settings of a pipeline, without the settings of a subclass."""
        return self.model_dump(include={*ClassifierRunSection.model_fields})


class ClassifySection(ClassifierRunSection):
    """Texts, and how the classifier runs."""

    input: str
    """File, folder or quoted glob, or a URI."""
    coverage: Coverage | None = None
    """Add conformal sets, or intervals of numbers, that contain on average this share of a record's true labels. Needs
    a calibrated model."""


class ClassifyEvaluateSection(ClassifierRunSection):
    """Records, report, and how the classifier runs."""

    input: str | None = None
    """Labelled file, folder or quoted glob, or a URI. Default: the run's own records."""
    output: Path | None = None
    """Folder of the report. Default: RUN/evaluations/INPUT-PART, or evaluation-INPUT-PART."""
    part: Part | None = None
    """Records of the input by the split column of the run's settings, all by default; or of the run's own by its split,
    those held out for validation by default."""
    calibrate: bool = False
    """Calibrate the model with these records and save the calibration in its export. Never use test records."""
    baselines: bool = False
    """Fit simple baselines on what the run was trained on and show their metrics as baselines."""

    def own_part(self) -> Part:
        """The part that is evaluated."""
        return self.part or ("all" if self.input else "validation")


def opened_classification(
    model: str | Path, section: ClassifySection, overrides: Overrides
) -> tuple["ClassifierPipeline", TextStream, Iterator[TextPart], str]:
    """Read the first records, then open the classifier. Raises as :func:`classify`.

    Return the classifier, the records as a stream and in parts, and the separator of the names of several labels.
    """
    # Resolved once: a URI is asked for its files each time.
    folder, _ = exported_classifier(model)
    config = config_of(folder, overrides)
    stream = TextStream([section.input], config.data.labels, config.model.tokenizer, config.data.ingest)
    chunks = stream.parts(CHUNK_CHARACTERS)
    first = list(islice(chunks, 1))  # without it an empty file would be found out after torch is loaded
    if not first:
        raise DataError("no records left after data.ingest and data.labels were applied")
    from esmeray.inference.classifier import ClassifierPipeline  # here: it loads torch

    pipeline = ClassifierPipeline.load(folder, data=config.data, coverage=section.coverage, **section.options())
    return pipeline, stream, chain(first, chunks), config.data.labels.separator


def classify(
    model: str | Path,
    input: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
    **settings: "Unpack[ClassifySettings]",
) -> "pd.DataFrame":
    """Predict the labels of a file by a trained classifier, as ``esmeray classify predict``.

    Args:
        model: folder of a run, or of an export of one.
        input: FASTA file or table, folder or glob, or a URI. For a list of sequences see ``ClassifierPipeline``.
        config: settings that override the run's, by the names of docs/config.md, such as ``data.labels.id_column``.
        settings: others of the command: ``coverage``, ``device``, ``precision`` and ``tokens``.

    Returns a row for each record: ``id``, ``label`` and ``probability_NAME`` of each class, an array for labels of
    residues; for regression ``predicted_NAME`` in place of these. With a coverage, ``set`` and ``set_size``, or for
    regression ``lower_NAME`` and ``upper_NAME``. Raises EsmerayError for what the command refuses.

    >>> table = esmeray.classify("classifier", "proteins.fasta", device="cpu")
    >>> table["id"].tolist(), [*table.columns][:2]
    (['first', 'second', 'third'], ['id', 'label'])
    """
    section = ClassifySection.of(input=str(input), **settings)
    pipeline, _, chunks, separator = opened_classification(model, section, overrides_of(config))
    import pandas as pd

    from esmeray.inference.classify.prediction_table import predict_all, prediction_columns  # here: they load torch

    frames: list[pd.DataFrame] = []
    predict_all(
        pipeline,
        chunks,
        lambda ids, predictions: frames.append(pd.DataFrame(prediction_columns(ids, predictions, separator))),
    )
    return pd.concat(frames, ignore_index=True)


@dataclass(frozen=True)
class ClassifierEvaluation:
    """Metrics of a classifier.

    Attributes:
        records: number of records that were evaluated.
        content: the content of evaluation.json: metrics, their intervals, and the baselines' metrics.
        counts: numbers of records that were changed or left out, by name.
        best_of: the metric that chose the model, or None.
        training_known: whether it is known which of the records the model was trained on.
    """

    records: int
    content: dict[str, Any] = field(repr=False)
    counts: dict[str, int] = field(repr=False)
    best_of: str | None = None
    training_known: bool = True

    @property
    def metrics(self) -> "pd.DataFrame":
        """A row for each metric, a column for the model and for each baseline."""
        import pandas as pd

        columns = {"model": self.content, **self.content["baselines"]}
        return pd.DataFrame({name: column["metrics"] for name, column in columns.items()})


def evaluate(
    model: str | Path,
    input: str | Path | None = None,
    *,
    overwrite: bool = False,
    config: Mapping[str, Any] | None = None,
    **settings: "Unpack[EvaluateSettings]",
) -> ClassifierEvaluation:
    """Evaluate a trained classifier on a labelled file, or on what its run held out, as ``esmeray classify evaluate``.

    Args:
        model: folder of a run, or of an export of one.
        input: labelled file, folder or glob, or a URI; by default the run's own records.
        overwrite: replace an output that an evaluation made.
        config: settings that override the run's, by the names of docs/config.md, such as ``data.labels.label_columns``.
        settings: others of the command: ``output``, a folder for the report (by default nothing is written), ``part``,
            ``calibrate``, ``baselines``, ``device`` ...

    Raises EsmerayError for what the command refuses.

    >>> evaluation = esmeray.evaluate("classifier", "labelled.fasta", config={"data.labels.header_field": 1})
    >>> evaluation
    ClassifierEvaluation(records=3, best_of=None, training_known=False)
    >>> "accuracy" in evaluation.metrics.index
    True
    """
    section = ClassifyEvaluateSection.of(input=None if input is None else str(input), **settings)
    folder, space = exported_classifier(model)
    overrides = overrides_of(config)
    # Options on the command line are for the file: records of the run are found by the settings that it had.
    recorded, own = config_of(folder), config_of(folder, overrides)
    part = section.own_part()
    if section.calibrate and part not in ("validation", "validation" if section.input is None else "all"):
        raise ConfigError(
            f"--evaluate.calibrate: not with {part} records; leave --evaluate.part out to use the validation records"
        )
    if section.output is not None:
        refuse_existing(section.output, EVALUATED_BY, overwrite)
    trained_N = identities_N = None  # as long as they are not known
    if section.input is None:
        texts = own_texts(recorded.run, recorded.data, recorded.model.tokenizer, space, part)
    else:
        texts = read_texts([section.input], own.data, own.model.tokenizer, space, part, overrides)
    trained = training_store(recorded.run, recorded.data)
    if trained is not None and section.calibrate:
        _refuse_used(trained, texts.texts, section.input or "the held-out records")
    if trained is not None and section.input is not None:
        trained_N = _are_in(trained, trained.training, texts.texts)
    training = None
    if section.baselines:
        known = own_texts(recorded.run, recorded.data, recorded.model.tokenizer, space, "training")
        # A baseline that was fitted to what it is evaluated on would look better than it is.
        training = without_texts(known, set(texts.texts))
    from esmeray.inference.classifier import ClassifierPipeline  # here: it loads torch

    pipeline = ClassifierPipeline.load(folder, data=own.data, calibrated=False, **section.options())
    from esmeray.inference.calibration import CALIBRATION_FILE, Calibration, fit  # here: it loads scipy.optimize
    from esmeray.inference.classify.report import evaluation_of, scored_by, write_report
    from esmeray.model.export.exported_folder import MADE_BY

    scored, baselines, counts = scored_by(pipeline, own.model.tokenizer, texts, training)
    fingerprint = pipeline.model.facts.fingerprint
    if section.calibrate:
        fitted = fit(space.kind, scored.probabilities, scored.targets, scored.records, fingerprint)
        with grown_folder(folder, folder, MADE_BY) as building:
            fitted.model_copy(update={"held_out": section.input is None}).save(building / CALIBRATION_FILE)
    calibration = Calibration.load(folder / CALIBRATION_FILE, fingerprint)
    # The run's own training records have identity 1.
    if trained is not None and not trained.store.is_text and (section.input or part in ("validation", "test")):
        identities_N = sampled_identities(texts.texts, trained, own.run.seed)
    content = evaluation_of(
        scored,
        baselines,
        trained_N=trained_N,
        seed=own.run.seed,
        identities_N=identities_N,
        calibration=calibration,
    )
    best_metric = own.model.classifier.best_metric
    best_of = None if best_metric == "auto" else best_metric
    training_known = section.input is None or trained_N is not None
    if section.output is not None:
        facts = {
            "model": str(model),
            "data": section.input or f"the run's own ({', '.join(own.data.source)})",
            "part": part,
            # In the report: who reads it later does not see what was printed.
            **({} if training_known else {"trained on its records": "not known"}),
            "device": str(pipeline.model.device),
            "precision": pipeline.model.facts.precision,
        }
        with made_folder(section.output.absolute(), EVALUATED_BY, overwrite) as building:
            write_report(
                building, scored, content, best_of=best_of, counts=counts, facts=facts, calibration=calibration
            )
    return ClassifierEvaluation(len(texts.ids), content, counts, best_of, training_known)


def _refuse_used(store: "LabelledStore", texts: Sequence[str], source: str) -> None:
    """Raise DataError if the run trained on some of these calibrating texts, or tests on them."""
    unfit = _are_in(store, np.concatenate([store.training, store.test]), texts).sum()
    if unfit:
        raise DataError(f"{source}: {unfit:,} are in the run's training or test data; calibrate with other records")


def _are_in(store: "LabelledStore", records: "NDArray[np.int64]", texts: Sequence[str]) -> "NDArray[np.bool_]":
    """Return (N,) True for texts that are sequences of these records of the store."""
    return np.isin(hashes_of([text.encode() for text in texts]), store.store.sequence_hashes[records])
