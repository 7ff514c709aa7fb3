"""Score all single mutants of a protein, or of several, by a masked language model, and draw them as heat maps.

Writes a folder: mutants.csv, and heat_map.png with the wild type marked and positions numbered as in the table; of
several proteins heat_map_1.png and so on, in the order of the FASTA file. Scores are those of esmeray mutations score.
The same command resumes a job that was ended.

Examples:
  esmeray mutations scan facebook/esm2_t12_35M_UR50D --scan.sequence wild.fasta --scan.output scan
  esmeray mutations scan facebook/esm2_t12_35M_UR50D --scan.sequence wild.fasta --scan.output scan \
--scan.method wild_type --scan.first_position 24
"""

import numpy as np

from esmeray.common.text import counted
from esmeray.inference.mutations.section import MutationScanSection
from esmeray.inference.mutations.variants import Variant
from esmeray.run_folder.job import unfinished
from esmeray.tools.grammar import Made, command
from esmeray.tools.mutations.score import OfMaskedModel, job_of


@command("mutations scan", __doc__, made_by="scan_mutations")
def main(model: OfMaskedModel, scan: MutationScanSection, made: Made) -> None:
    from esmeray.inference.mutations.table import PROTEIN_COLUMN, read_proteins, write_scores  # here: it loads pandas

    made.refuse_existing(scan.output)
    sources = [str(model), *scan.more_models]
    with unfinished(scan.output, job_of("scan", sources, scan)) as folder:
        proteins = read_proteins(scan, folder)
        from esmeray.inference.mutations.fitted import predictions_of  # here: they load torch and Matplotlib
        from esmeray.inference.mutations.heat_map import draw_scan

        variants = [Variant(protein, mutant) for protein in proteins for mutant in protein.singles()]
        # Of several models the mean, as mutations score has it.
        scores_N = np.mean([each.mean for each in predictions_of(sources, variants, scan, folder, {})], axis=0)
        mutations = [variant.mutant.mutations[0] for variant in variants]
        names = {PROTEIN_COLUMN: [variant.protein.name for variant in variants]} if len(proteins) > 1 else {}
        columns = {
            **names,
            "mutant": [protein.text_of(mutant) for protein, mutant in variants],
            "position": [variant.mutant.mutations[0].offset + variant.protein.first for variant in variants],
            "score": scores_N,
        }
        with made.folder(scan.output) as building:
            write_scores(building / "mutants.csv", "mutants.csv", columns)
            for number, protein in enumerate(proteins, 1):
                rows = [row for row, variant in enumerate(variants) if variant.protein == protein]
                picture = f"heat_map_{number}.png" if names else "heat_map.png"
                title = f"{protein.name} by {model}, {scan.method}"
                draw_scan(building / picture, protein, [mutations[row] for row in rows], scores_N[rows], title)
    best = columns["mutant"][int(scores_N.argmax())]
    print(f"{scan.output}: {counted(len(variants), 'mutant{s}')}, the best is {best} ({scores_N.max():.3f})")
