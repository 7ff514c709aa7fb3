"""Fit a model to labelled proteins, so that vectors of one group are close, in minutes and without a GPU.

Groups are predicted from counts of gapped k-mers by kernel ridge regression, without training steps. The result is a
folder that embed run takes as a model. Its output is named relatives and compared by cosine similarity. The command
prints the share of proteins whose group is predicted correctly by a regression on all other proteins. Expect this share
for new proteins if they are as far from the labelled proteins as these are from each other.

Labels may be nested, with dots between their parts: --fit.level 1 takes b.82.2.13 as b.82.2.

Examples:
  esmeray embed fit --fit.input domains.fasta --fit.labels domains.tsv --fit.label_column classification \
--fit.level 1 --fit.output relatives
  esmeray embed run --embed.models relatives --embed.outputs relatives --embed.input proteins.fasta \
--embed.output vectors
"""

from pathlib import Path

import numpy as np
from pydantic import Field

from esmeray.common.command_line import next_command, say
from esmeray.common.errors import ConfigError, DataError
from esmeray.common.progress import status_line
from esmeray.common.publishing import refuse_existing
from esmeray.common.text import counted
from esmeray.dataset.labels.label_space import level_ids
from esmeray.dataset.labels.values import labels_by_id, labels_of
from esmeray.dataset.store.conversion import job_store
from esmeray.model.export.exported_folder import MADE_BY
from esmeray.monitoring.sampling.host import memory_of_this_machine
from esmeray.run_folder.job import unfinished
from esmeray.tools.grammar import IngestedSection, Overwrite, command
from esmeray.train_config.section import NonNegativeInt, PositiveInt, Section

FEATURES = 2048
"""Number of principal components of the counts."""
CHANNELS = 512
"""Maximum number of channels of a vector."""
_COUNTS_BYTES = 400_000
"""Memory per protein while principal components of the counts are computed."""
_PAIR_BYTES = 12
"""Memory per pair of proteins during the regression."""


class FitSection(Section):
    """Labelled proteins, and the size of the model."""

    input: str
    """Proteins as a FASTA file, folder or quoted glob, or as a store."""
    labels: Path
    """CSV, TSV or Parquet file of labels, with a column id; proteins without a label are left out."""
    label_column: str = "label"
    """Name of the column of labels in the file of labels."""
    not_missing: list[str] = Field(default=[])
    """Labels that are names, although tables use them for missing values, e.g. NA (neuraminidase)."""
    level: NonNegativeInt = 0
    """Number of last parts to remove from each label."""
    output: Path
    """Folder to write the model to."""
    learnt: PositiveInt = 16_384
    """Maximum number of proteins to learn from, sampled if there are more; 16,384 take about 7 GB of memory."""
    seed: NonNegativeInt = 0
    """Seed of the sample of proteins and of the principal components."""


@command("embed fit", __doc__)
def main(fit: FitSection, data: IngestedSection, overwrite: Overwrite = False) -> None:
    refuse_existing(fit.output, MADE_BY, overwrite)
    by_id = labels_by_id(fit.labels, fit.label_column, "fit", fit.not_missing)
    with unfinished(fit.output, "embed fit") as folder:
        store = job_store([fit.input], data.ingest, folder)
        ids = [store.id(record) for record in range(len(store))]
        labels = labels_of(ids, by_id, fit.input, fit.labels)
        groups = level_ids([labels.get(name, "") for name in ids], fit.level + 1)[:, fit.level]
        records = np.flatnonzero(groups >= 0)
        if records.size > fit.learnt:
            records = np.sort(np.random.default_rng(fit.seed).choice(records, fit.learnt, replace=False))
        if np.unique(groups[records]).size in (0, 1, records.size):
            raise DataError(
                f"{fit.labels}: the {counted(records.size, 'labelled protein{s}')} of {fit.input} must form at "
                "least two groups, one of them with two proteins; see --fit.label_column and --fit.level"
            )
        needed = max(_COUNTS_BYTES * records.size, _PAIR_BYTES * records.size**2)
        free = memory_of_this_machine().available
        if needed > free:
            raise ConfigError(
                f"--fit.learnt: fitting {records.size:,} proteins needs {needed / 1e9:.1f} GB of "
                f"memory, but only {free / 1e9:.1f} GB are free; give a smaller number"
            )
        from esmeray.inference.retrieval.fitting import fit as fitted_to  # here: it loads torch
        from esmeray.model.relatives import write_relatives

        _, learnt_groups = np.unique(groups[records], return_inverse=True)
        with status_line() as status:
            sequences = [store.sequence(record) for record in records.tolist()]
            table, head, named = fitted_to(sequences, learnt_groups, FEATURES, CHANNELS, fit.seed, status)
        write_relatives(table, head, store.sequence_hashes[records], fit.output, overwrite)
    print(
        f"{fit.output}: {counted(records.size, 'protein{s}')} in "
        f"{counted(learnt_groups.max() + 1, 'group{s}')}; {named:.1%} of proteins with relatives are "
        "assigned correctly (leave-one-out)"
    )
    run = f"embed run --embed.models {fit.output} --embed.outputs relatives --embed.input proteins.fasta"
    say(next_command(*run.split(), "--embed.output", f"{fit.output}-vectors"))
