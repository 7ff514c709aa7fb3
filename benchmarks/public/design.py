"""Native sequences recovered from backbones of test chains, by sequence diffusion trained from random weights."""

from benchmarks.public.benchmark import Metric, PublicBenchmark, Value, Work


def _recovery(work: Work) -> dict[str, Value]:
    sources = "--data.source DATA/structures/train --data.structures.validation_source DATA/structures/valid"
    work.run(f"train --config train_config/structdiff.yaml --run.name design {work.training} {sources}")
    if not (work.folder / "test_store").exists():  # a seed that was stopped has it
        work.run("data structures --data.source DATA/structures/test --structures.store FOLDER/test_store")
    output = "--evaluate.output FOLDER/metrics.json --overwrite"
    work.run(f"design evaluate FOLDER/design --evaluate.store FOLDER/test_store {output}")
    # The end of an interval is NaN if its resamplings have none.
    return {name: Value.model_validate(metric) for name, metric in work.read("metrics.json")["metrics"].items()}


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
        ),
        measure=_recovery,
    ),
)
