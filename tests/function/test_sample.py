"""The embedded ontology and its proteins."""

from esmeray.dataset.section import SampleSection
from esmeray.function.annotations import read_annotations
from esmeray.function.ontology import read_ontology
from esmeray.function.sample import NAMESPACES, write_sample


def test_500_terms_in_three_namespaces_and_every_protein_annotated_in_each(tmp_path):
    write_sample(tmp_path, SampleSection(records=100, families=20))
    ontology = read_ontology(tmp_path / "terms.obo")
    assert {name: len(one.terms) for name, one in ontology.aspects.items()} == NAMESPACES
    assert sum(NAMESPACES.values()) == 500
    seen = set()
    for part in ("train", "test"):
        lines = (tmp_path / f"{part}.fasta").read_text().splitlines()
        ids = {line[1:] for line in lines if line.startswith(">")}
        found = read_annotations(tmp_path / f"{part}.tsv", ontology)
        assert all(set(some.proteins) == ids for some in found.values()) and len(found) == 3
        assert not seen & ids
        seen |= ids
    assert len(seen) == 100


def test_the_same_settings_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_sample(tmp_path / name, SampleSection(records=50, families=10, seed=4))
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
