"""Choose the layer of a model whose vectors predict your labels best, and save the model cut at it.

All layers are computed in one pass. A linear probe is fitted to each with nested folds: inner folds choose the penalty
and the layer, outer folds score them on other records. --data.labels.kind sets the task: multiclass or binary
(accuracy), regression (Spearman's coefficient) or per_residue (accuracy). At most 20,000 labels are used. With
--layers.retrieval true a layer is scored by the label of the nearest neighbour.

Other settings of --data.labels (see esmeray train --help) name the columns. No fold splits a group of
--data.labels.group_column, or equal sequences. --data.labels.split_column replaces the outer folds by its parts.

Writes a folder with layers.csv and layers.png: the score of each layer with its 95 % bootstrap interval over records.
The cut model is a Hugging Face folder. On the CPU, its vectors equal the vectors of --embed.layers byte for byte.

Examples:
  esmeray embed layers facebook/esm2_t12_35M_UR50D --layers.input proteins.csv --layers.output cut
  esmeray embed layers runs/lm --layers.input measured.csv --data.labels.kind regression \
--data.labels.label_columns tm --data.labels.split column --data.labels.split_column split
  esmeray embed layers Rostlab/prot_bert --layers.input families.tsv --layers.retrieval true
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from esmeray.inference.embedding.section import LayersSection
from esmeray.tools.grammar import Overwrite, command
from esmeray.train_config.section import Overrides


@command("embed layers", __doc__)
def main(
    model: Annotated[Path, Field(description="Model: folder, URI, hub name or run.")],
    layers: LayersSection,
    overrides: Overrides,
    overwrite: Overwrite = False,
) -> None:
    from esmeray.inference.layers import choose_layer  # imported here: it loads torch

    report = layers.report or Path(f"layers-{Path(layers.input[0]).name.split('.')[0]}")
    config = {".".join(key): value for key, value in overrides.items()}
    choice = choose_layer(model, **{**dict(layers), "report": report}, overwrite=overwrite, config=config)
    print(*choice.table.attrs["notes"], choice.table.to_string(float_format="{:.3f}".format), sep="\n")
    print(f"layer {choice.layer} is chosen; the last row is the score of the choice on other records")
    print(f"written: {report}/layers.csv and layers.png" + f", {layers.output}" * (layers.output is not None))
