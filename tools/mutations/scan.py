"""Score all single mutants of a protein by a masked language model, and draw them as a heat map.

Writes a folder: mutants.csv, and heat_map.png with the wild type marked and positions numbered as in the table. Scores
are those of esmeray mutations score. The same command resumes a job that was ended.

Examples:
  esmeray mutations scan facebook/esm2_t12_35M_UR50D --scan.sequence wild.fasta --scan.output scan
  esmeray mutations scan facebook/esm2_t12_35M_UR50D --scan.sequence wild.fasta --scan.output scan \
--scan.method wild_type --scan.first_position 24
"""

from esmeray.common.text import counted
from esmeray.inference.mutations.section import MutationScanSection
from esmeray.inference.mutations.table import read_protein, write_scores
from esmeray.run_folder.job import unfinished
from esmeray.tools.grammar import Made, command
from esmeray.tools.mutations.score import OfMaskedModel, job_of


@command("mutations scan", __doc__, made_by="scan_mutations")
def main(model: OfMaskedModel, scan: MutationScanSection, made: Made) -> None:
    made.refuse_existing(scan.output)
    sources = [str(model), *scan.more_models]
    with unfinished(scan.output, job_of("scan", sources, scan)) as folder:
        protein = read_protein(scan, folder)
        from esmeray.inference.mutations.fitted import scores_of  # here: they load torch and Matplotlib
        from esmeray.inference.mutations.heat_map import draw_scan

        mutants = [*protein.singles()]
        # Of several models the mean, as mutations score has it.
        scores_N = scores_of(sources, protein, mutants, scan, folder, {}).mean(axis=0)
        mutations = [mutant.mutations[0] for mutant in mutants]
        columns = {
            "mutant": [protein.text(mutation) for mutation in mutations],
            "position": [mutation.offset + protein.first for mutation in mutations],
            "score": scores_N,
        }
        with made.folder(scan.output) as building:
            write_scores(building / "mutants.csv", "mutants.csv", columns)
            title = f"{scan.sequence.name} by {model}, {scan.method}"
            draw_scan(building / "heat_map.png", protein, mutations, scores_N, title)
    best = columns["mutant"][int(scores_N.argmax())]
    print(f"{scan.output}: {counted(len(mutants), 'mutant{s}')}, the best is {best} ({scores_N.max():.3f})")
