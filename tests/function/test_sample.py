"""The embedded ontology and its proteins."""

from esmeray.dataset.section import SampleSection
from esmeray.function.annotations import read_annotations
from esmeray.function.ontology import read_ontology
from esmeray.function.sample import NAMESPACES, write_sample


def test_the_sample_has_500_terms_and_every_protein_is_annotated(tmp_path):
    write_sample(tmp_path, SampleSection(records=100, families=20))
    ontology = read_ontology(tmp_path / "terms.obo")
    assert {name: len(aspect.terms) for name, aspect in ontology.aspects.items()} == NAMESPACES
    assert sum(NAMESPACES.values()) == 500
    proteins = []
    for split in ("train", "test"):
        lines = (tmp_path / f"{split}.fasta").read_text().splitlines()
        ids = [line[1:] for line in lines if line.startswith(">")]
        annotations = read_annotations(tmp_path / f"{split}.tsv", ontology)
        assert [{*aspect.proteins} for aspect in annotations.values()] == [{*ids}] * 3
        proteins += ids
    assert len({*proteins}) == len(proteins) == 100
    again = tmp_path / "again"
    again.mkdir()
    write_sample(again, SampleSection(records=100, families=20))
    assert all(path.read_bytes() == (tmp_path / path.name).read_bytes() for path in again.iterdir())
