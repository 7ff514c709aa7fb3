"""Scan, fit and propose as functions of Python, which the commands of these names call.

The wild type may be a text and the measurements a DataFrame: they are written to the work folder and read by the same
rules as other files. Settings of a command that are not arguments of its function are given by their names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from esmeray.common.publishing import NOTES, made_file, made_folder, output_or_scratch, refuse_existing, refuse_file
from esmeray.dataset.sequence_list import checked_paths
from esmeray.inference.mutations.section import (
    MutationFitSection,
    MutationProposeSection,
    MutationScanSection,
    MutationsSection,
)
from esmeray.inference.mutations.variants import Variant
from esmeray.model.export.exported_folder import MADE_BY
from esmeray.run_folder.job import unfinished

if TYPE_CHECKING:
    import pandas as pd

    from esmeray.inference.settings import FitMutantsSettings, ProposeSettings, ScanSettings

SCANNED_BY, PROPOSED_BY = "scan_mutations", "propose_mutations"
_TABLE = "table.csv"


def job_of(command: str, sources: Sequence[str], section: MutationsSection) -> str:
    """The name of a job: each method and model has rows of its own in the unfinished folder."""
    return f"mutations {command} by {section.method} of {' '.join(sources)}"


def scan(
    model: str | Path,
    sequence: str | Path | None,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    **settings: "Unpack[ScanSettings]",
) -> "pd.DataFrame":
    """Score all single mutants of a protein, or of several, as ``esmeray mutations scan``.

    Args:
        model: a masked language model, as :func:`esmeray.open_model` takes it, or a fitted one.
        sequence: residues of the wild type, or the Path of a FASTA file.
        output: folder to write mutants.csv and the heat maps to; by default nothing is written.
        overwrite: replace an output that a scan made.
        settings: others of the command, such as ``method``, ``first_position`` and ``device``.

    Returns a row for each mutant: ``mutant``, ``position`` and ``score``, the log-probability ratio to the wild type,
    after ``protein`` if there are several. Raises EsmerayError for what the command refuses.

    >>> esmeray.scan("esm2", "MKTAYIAKQR", method="wild_type", first_position=24)[["mutant", "position"]].head(2)
      mutant  position
    0   M24A        24
    1   M24C        24
    """
    with output_or_scratch(output) as target:
        file = None if isinstance(sequence, str) else sequence
        section = MutationScanSection.of(sequence=file, output=target, **settings)
        refuse_existing(section.output, SCANNED_BY, overwrite)
        with unfinished(section.output, job_of("scan", [str(model)], section)) as folder:
            import pandas as pd

            from esmeray.inference.mutations.table import PROTEIN_COLUMN, read_proteins, write_scores

            proteins = read_proteins(sequence, section.first_position, folder)
            from esmeray.inference.mutations.fitted import predict  # here: it loads torch

            variants = [Variant(protein, mutant) for protein in proteins for mutant in protein.singles()]
            table = pd.DataFrame(
                {
                    PROTEIN_COLUMN: [protein.name for protein, _ in variants],
                    "mutant": [protein.text_of(mutant) for protein, mutant in variants],
                    "position": [mutant.mutations[0].offset + protein.first for protein, mutant in variants],
                    "score": predict(str(model), variants, section, folder, {}).mean,
                }
            )
            if len({protein for protein, _ in variants}) == 1:
                table = table.drop(columns=PROTEIN_COLUMN)
            if output is not None:
                with made_folder(section.output.absolute(), SCANNED_BY, overwrite) as building:
                    write_scores(building / "mutants.csv", "mutants.csv", table)
                    _draw_scans(building, variants, table["score"].to_numpy(), f"by {model}, {section.method}")
    return table


def _draw_scans(folder: Path, variants: Sequence[Variant], scores_N: Any, title: str) -> None:
    """Draw a heat map of each protein."""
    from esmeray.inference.mutations.heat_map import draw_scan  # here: it loads Matplotlib

    proteins = [*dict.fromkeys(variant.protein for variant in variants)]
    for number, protein in enumerate(proteins, 1):
        is_own_N = [variant.protein == protein for variant in variants]
        picture = f"heat_map_{number}.png" if len(proteins) > 1 else "heat_map.png"
        draw_scan(folder / picture, protein, scores_N[is_own_N], f"{protein.name} {title}")


@dataclass(frozen=True)
class MutantFit:
    """A model that was fitted to measured mutants.

    Attributes:
        folder: what :func:`esmeray.score_mutants`, ``scan`` and ``propose`` take as a model.
        evaluations: metrics and their intervals by kind of fold, then by protein, as in evaluation.json.
        notes: lines about what was left out or averaged.
    """

    folder: Path
    evaluations: dict[str, dict[str, dict[str, Any]]] = field(repr=False)
    notes: list[str] = field(repr=False)

    @property
    def metrics(self) -> "pd.DataFrame":
        """A row of metrics for each kind of fold and protein."""
        import pandas as pd

        from esmeray.inference.mutations.metrics import metrics_table

        tables = {kind.removeprefix("Folds "): metrics_table(own) for kind, own in self.evaluations.items()}
        return pd.concat(tables, names=["folds", "protein"])


def fit_mutants(
    model: str | Path | None,
    sequence: str | Path | None,
    table: "str | Path | Sequence[str | Path] | pd.DataFrame",
    output: str | Path,
    *,
    overwrite: bool = False,
    **settings: "Unpack[FitMutantsSettings]",
) -> MutantFit:
    """Fit a model to measured mutants of a protein, or of several, as ``esmeray mutations fit``, and cross-validate it.

    Args:
        model: a masked language model; None with ``features="one_hot"`` and a ``zero_shot_column``.
        sequence: residues of the wild type, or the Path of a FASTA file.
        table: mutants and their values: a DataFrame, or the path of a table or of a folder of tables, or several.
        output: folder to write the fitted model to. The same call resumes a fit that was ended.
        overwrite: replace an output that a fit made.
        settings: others of the command, such as ``measured_column``, ``features``, ``folds`` and ``device``.

    Raises EsmerayError for what the command refuses.

    >>> fit = esmeray.fit_mutants("esm2", "MKTAYIAKQR", measured, "fitted", folds=["random"])
    features of 40 mutants: embeddings; zero-shot scores by esm2 (masked)
    >>> fit
    MutantFit(folder=PosixPath('fitted'))
    >>> fit.metrics["spearman"].index.names
    FrozenList(['folds', 'protein'])
    """
    frame: Any = table if hasattr(table, "to_csv") else None
    file = None if isinstance(sequence, str) else sequence
    # A frame has a path, too, so that all settings are checked at once.
    paths = checked_paths(table, "table") if frame is None else [_TABLE]
    section = MutationFitSection.of(sequence=file, table=paths, output=output, **settings)
    refuse_existing(section.output, MADE_BY, overwrite)
    with unfinished(section.output, f"mutations fit of {model}") as folder:
        from esmeray.inference.mutations.table import read_mutants  # here: it loads pandas

        if frame is not None:
            frame.to_csv(folder / _TABLE, index=False)
            section = section.model_copy(update={"table": [folder / _TABLE]})
        numbers = {
            section.measured_column: "fit.measured_column",
            section.zero_shot_column: "fit.zero_shot_column",
        }
        mutants = read_mutants(section, sequence, folder, "fit", numbers, groups=section.groups)
        from esmeray.inference.mutations.fitted import export, fit_table  # here: it loads torch

        fitted, evaluations = fit_table(None if model is None else Path(model), mutants, section, folder)
        export(fitted, evaluations, section.output, overwrite)
    return MutantFit(section.output, evaluations, mutants.lines())


def propose(
    model: str | Path,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    **settings: "Unpack[ProposeSettings]",
) -> "pd.DataFrame":
    """Propose the mutants to measure next, by a model that :func:`fit_mutants` made, as ``esmeray mutations propose``.

    Args:
        model: folder of the fitted model.
        output: CSV file to write; by default nothing is written.
        overwrite: replace an output that propose made.
        settings: others of the command, such as ``number``, ``strategy``, ``exclude_positions`` and ``device``.

    Returns the columns of the fit's table, the measured values empty, then ``predicted``, ``predicted_low`` and
    ``predicted_high``. ``attrs["notes"]`` counts the mutants that were no candidates, by the reason. Raises
    EsmerayError for what the command refuses.

    >>> plate = esmeray.propose("fitted", number=8, exclude_positions=["2-3"])
    >>> [*plate.columns]
    ['mutant', 'score', 'predicted', 'predicted_low', 'predicted_high']
    >>> plate.attrs["notes"][0]
    '  40 single mutants not proposed, already measured: M1C, M1D, M1E ...'
    """
    with output_or_scratch(output) as target:
        section = MutationProposeSection.of(output=target, **settings)
        refuse_file(section.output, PROPOSED_BY, overwrite)
        with unfinished(section.output, f"mutations propose by {model}") as folder:
            import pandas as pd

            from esmeray.inference.mutations.fitted import open_fitted  # here: they load torch
            from esmeray.inference.mutations.proposal import Proposer
            from esmeray.inference.mutations.table import write_scores

            proposer = Proposer(open_fitted(model), section, folder)
            plate = pd.DataFrame(proposer.plate())
            with made_file(section.output, PROPOSED_BY, overwrite) as building:
                write_scores(building, section.output.name, plate)
    plate.attrs[NOTES] = proposer.lines()
    return plate
