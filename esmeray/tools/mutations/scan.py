"""Score all single mutants of one or several proteins with a masked language model, and draw heat maps.

Writes a folder: mutants.csv, and heat_map.png with the wild type marked and positions numbered as in the table. For
several proteins the pictures are heat_map_1.png and so on, in the order of the FASTA file. The scores are the same as
from esmeray mutations score. The same command resumes an interrupted job.

Examples:
  esmeray mutations scan facebook/esm2_t12_35M_UR50D --scan.sequence wild.fasta --scan.output scan
  esmeray mutations scan facebook/esm2_t12_35M_UR50D --scan.sequence wild.fasta --scan.output scan \
--scan.method wild_type --scan.first_position 24
"""

from esmeray.common.text import counted
from esmeray.inference.mutations.calls import SCANNED_BY
from esmeray.inference.mutations.calls import scan as scan_mutants
from esmeray.inference.mutations.section import MutationScanSection
from esmeray.tools.grammar import OutputWriter, command
from esmeray.tools.mutations.score import MaskedModelPath


@command("mutations scan", __doc__, made_by=SCANNED_BY)
def main(model: MaskedModelPath, scan: MutationScanSection, writer: OutputWriter) -> None:
    table = scan_mutants(model, **dict(scan), overwrite=writer.overwrite)
    best = table.loc[table["score"].idxmax()]
    print(f"{scan.output}: {counted(len(table), 'mutant{s}')}, best: {best['mutant']} ({best['score']:.3f})")
