"""Compute embeddings of proteins in FASTA files or a store, on every device, and write them to files.

A model is a folder or a hub name of transformers (ESM-2, ESM C, ProtBERT, Ankh, ProtT5), an Esmeray run, or its export.
Equal sequences are computed once. Vectors of proteins are written as Parquet, .npy or HDF5, in the order of the input,
vectors of residues as safetensors. The folder appears when it is complete. Until then files are kept in OUTPUT.partial,
from which the same command resumes. Read the folder with esmeray.read_embeddings.

A finished output can be extended: the same command with more input computes the records whose ids the output lacks, and
adds them as a part, OUTPUT/part-00001. Existing files stay unchanged, and readers see the old state until the part is
complete. An id with another sequence is refused. --embed.known takes vectors of known sequences from other outputs.

Without a cluster this process computes. If there are several GPUs, or --ray.address or RAY_ADDRESS names a Ray cluster,
an actor on each device computes. --dry_run reports sequences, duplicates, bytes and time, and writes nothing.

Examples:
  esmeray embed run --embed.models facebook/esm2_t6_8M_UR50D --embed.input proteins.fasta --embed.output vectors
  esmeray embed run --embed.models runs/esm2ae --embed.input proteins.store --embed.output latents \
--embed.outputs latents --embed.dtype fp16
  esmeray embed run --embed.models facebook/esm2_t6_8M_UR50D Rostlab/prot_bert --embed.input 'faa/*.faa' \
--embed.output both --dry_run
  esmeray embed run --embed.models my-esm2 --embed.input all.fasta --embed.output residues \
--embed.outputs residues mean --embed.long window --embed.max_length 1022
  esmeray embed run --embed.models my-esm2 --embed.input new.fasta --embed.output vectors --embed.known s3://lab/vectors
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from esmeray.cluster.placement import LOCAL, find, local_resources
from esmeray.cluster.section import RaySection
from esmeray.common.command_line import next_command, result_console
from esmeray.common.publishing import PARTS
from esmeray.common.remote import uri_of
from esmeray.dataset.embeddings.manifest import MANIFEST_FILE, read_manifest
from esmeray.inference.embedding.job import estimate, run_job
from esmeray.inference.embedding.section import EmbedJobSection
from esmeray.run_folder.section import StorageSection
from esmeray.tools.grammar import ClusterSection, IngestedSection, OutputWriter, command


@command("embed run", __doc__, made_by="embed")
def main(
    embed: EmbedJobSection,
    data: IngestedSection,
    storage: StorageSection,
    ray: ClusterSection,
    writer: OutputWriter,
    dry_run: Annotated[
        bool, Field(description="Measure the speed and report sequences, bytes and time, without writing anything.")
    ] = False,
) -> None:
    """Plan the job, compute and publish the embeddings, and print the table of performance."""
    storage.apply()
    # A finished output may belong to this job: run_job compares them, and extends or keeps it.
    if writer.overwrite or not any(embed.output.glob(f"**/{MANIFEST_FILE}")):
        writer.refuse_existing(embed.output)
    ((_, gpus),) = local_resources()
    section = RaySection(address=ray.address)
    # With one device this process computes, because starting a cluster takes time.
    many = (embed.workers or 1) > 1 or (gpus > 1 and embed.device != "cpu")
    elsewhere = find(section) != LOCAL  # raises early if the cluster can't be used
    cluster = section if many or section.address or elsewhere else None
    console = result_console()
    if dry_run:
        console.print(*estimate(embed, data.ingest, cluster=cluster), sep="\n", markup=False)
        return
    reports = run_job(embed, data.ingest, cluster=cluster, overwrite=writer.overwrite)
    from esmeray.inference.embedding.report import table  # imported here, because it loads torch

    console.print(table(reports))
    # The newest part's lines, if the output has grown; parts of earlier versions have none.
    changes = [f"  {line}" for line in reports[-1].get("changes_of_input", [])]
    unknown = [f"  {report['model']}: {report['unknown']}" for report in reports if report.get("unknown")]
    written = f"written: {uri_of(embed.output) or embed.output}"
    console.print(written, *changes, *unknown, *_next_commands(embed.output), sep="\n", markup=False)


def _next_commands(folder: Path) -> Iterator[str]:
    """Yield the command that draws a map of each model's first output with one vector per protein."""
    for path in sorted(path for path in folder.glob(f"**/{MANIFEST_FILE}") if not path.parent.match(PARTS)):
        names = [name for name, output in read_manifest(path.parent).outputs.items() if output.per == "protein"]
        if names:
            yield next_command(
                "embed", "plot", path.parent, "--plot.name", names[0], "--plot.output", f"{path.parent}-map"
            )
