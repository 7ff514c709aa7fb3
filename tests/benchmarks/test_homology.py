import gzip
from pathlib import Path

import numpy as np

from benchmarks.public.homology import TUNING, blended, write_files


def test_neighbors_of_a_hit_rank_before_unrelated_sequences():
    # The query aligns with 1, and 2 is a neighbour of 1; 3 aligns by chance; 4 is similar to the query in vectors only.
    vectors_NC = np.array([[0, 0, 1], [1, 0, 0], [0.99, 0.14, 0], [0, 1, 0], [0, 0.6, 0.8]], dtype=np.float32)
    hits = np.array([0, 1, 3]), np.array([1e-50, 1e-9, 50.0])
    scores_N = blended(vectors_NC, 0, *hits, (0.9, 0.3, 0.9, 0.0))
    assert scores_N[0] >= scores_N[1] > scores_N[2] > 0.89 > scores_N[3] > scores_N[4]
    alone_N = blended(vectors_NC, 0, *hits, (0, 0, 1, 0))
    assert np.argsort(-alone_N, kind="stable").tolist() == [0, 1, 3, 2, 4], "the order of align"
    own_N = blended(vectors_NC, 0, *hits, (0.9, 0.3, 0.9, 0.5))
    assert own_N[4] > scores_N[3] and np.delete(own_N == scores_N, 4)[1:].all(), "by the cosine with the query"


def test_only_the_training_part_is_learnt_and_none_of_it_that_tunes(tmp_path: Path):
    names = [f"d{number}" for number in range(TUNING + 20)]
    parts = ["validation"] * 5 + ["other"] * 5 + ["training"] * (TUNING + 10)
    rows = [f"{name}\ta.1.1.1\t{part}" for name, part in zip(names, parts, strict=True)]
    (tmp_path / "domains.tsv").write_text("\n".join(["id\tclassification\tpart", *rows]))
    with gzip.open(tmp_path / "domains.fasta.gz", "wt") as file:
        file.writelines(f">{name}\nac\nde\n" for name in names)
    folder = tmp_path / "made"
    folder.mkdir()
    write_files(tmp_path, folder)
    _, *learnt = (folder / "learnt.fasta").read_text().split(">")
    assert {record.split()[1] for record in learnt} == {"ACDE"}
    tuning = set((folder / "tuning.txt").read_text().split())
    assert {record.split()[0] for record in learnt} == set(names[10:]) - tuning and tuning < set(names[10:])
    assert (folder / "labels.tsv").read_text().splitlines()[:2] == ["id\tlabel", "d0\ta.1.1.1"]
    assert (folder / "validation.txt").read_text().split() == names[:5]
