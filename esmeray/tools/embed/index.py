"""Build an index of embeddings on disk, which can be searched without loading it, and extended.

An index is a folder. An 'exact' index gives the same hits as a comparison with every vector, in the same order. A
'compressed' index compares a query with the nearest clusters by one bit per value, in memory, and compares the best
candidates again by fp16 values on disk. Vectors of another model, layer or pooling are refused. If the output is an
index already, vectors whose ids it lacks are added as new parts. An id with another sequence is refused.

Until the index is complete, files are kept in OUTPUT.partial, from which the same command resumes.

Examples:
  esmeray embed index swissprot --index.output proteins.index
  esmeray embed index swissprot proteome --index.output small.index --index.kind compressed
  esmeray embed index more_proteins --index.output proteins.index
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from esmeray.common.remote import uri_of
from esmeray.common.text import counted
from esmeray.inference.index.build import IndexSection, build_index
from esmeray.run_folder.section import StorageSection
from esmeray.tools.grammar import OutputWriter, command


@command("embed index", __doc__, made_by="index")
def main(
    vectors: Annotated[list[Path], Field(min_length=1, description="Folders of embeddings, or URIs of them.")],
    index: IndexSection,
    storage: StorageSection,
    writer: OutputWriter,
) -> None:
    storage.apply()
    built = build_index(vectors, **dict(index), overwrite=writer.overwrite)
    manifest = built.manifest
    known = f", {built.known:,} already present (same ids)" if built.known else ""
    kind = f"{manifest.kind}, {manifest.metric}, {counted(len(manifest.parts), 'part{s}')}"
    added = f"{counted(built.new, 'vector{s}')} added{known}"
    print(
        f"{uri_of(index.output) or index.output}: {added}; {manifest.count:,} vectors with "
        f"{manifest.channels:,} channels ({kind})"
    )
