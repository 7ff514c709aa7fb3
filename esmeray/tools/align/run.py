"""Align proteins with a store, and write the best hits of each protein in BLAST's tabular format.

Scores are exact: Smith-Waterman with affine gaps on all cores, or on a GPU. A gap of n residues costs gap_open plus n
times gap_extend, as in BLAST. The output has the columns of BLAST's output format 6. E-values and bit scores agree with
blastp without composition-based statistics. A prefilter aligns fewer records, and misses some hits. The same command
resumes an interrupted search.

Examples:
  esmeray align --align.queries proteins.fasta --align.store proteins.store --align.output hits.tsv
  esmeray align --align.queries proteins.fasta --align.store proteins.store --align.output close.tsv --align.hits 50 \
--align.evalue 1e-3 --align.matrix BLOSUM80
  esmeray align --align.queries proteins.fasta --align.store proteins.store --align.output fast.tsv \
--align.prefilter kmer --align.candidates 500
  esmeray align --align.queries proteins.fasta --align.store proteins.store --align.output near.tsv \
--align.prefilter embedding --align.embeddings embeddings
"""

import time

from esmeray.common.text import counted
from esmeray.dataset.fasta.counts import count_lines
from esmeray.inference.alignment import MADE_BY, AlignSection, align_to_file
from esmeray.tools.grammar import IngestedSection, OutputWriter, command


@command("align", __doc__, made_by=MADE_BY)
def main(align: AlignSection, data: IngestedSection, writer: OutputWriter) -> None:
    start_s = time.perf_counter()
    queries, records, hits = align_to_file(align, data.ingest, writer.overwrite)
    aligned = f"{counted(len(queries), 'protein{s}')} against {records:,}"
    print(f"{align.output}: {counted(hits, 'hit{s}')} for {aligned} ({time.perf_counter() - start_s:.1f} s)")
    print("\n".join(f"  {line}" for line in count_lines(queries.manifest.counts)))
