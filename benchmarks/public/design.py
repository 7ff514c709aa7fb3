"""Native sequences recovered from backbones of test chains, by sequence diffusion trained from random weights."""

from benchmarks.public.benchmark import Metric, PublicBenchmark, Value, Work


def _recovery(work: Work) -> dict[str, Value]:
    chains = work.data / "structures"
    held_out = ["--data.structures.validation_source", chains / "valid"]
    run_options = ["--run.name", "design", "--run.storage_path", work.folder, "--run.seed", work.seed]
    sources = ["--data.source", chains / "train", *held_out]
    work.run("train", "--config", "train_config/structdiff.yaml", *run_options, *sources, *work.backbone)
    test = work.folder / "test_store"
    if not test.exists():  # of a seed that was stopped
        work.run("data", "structures", "--data.source", chains / "test", "--structures.store", test)
    output = ["--evaluate.output", work.folder / "metrics.json", "--overwrite"]
    work.run("design", "evaluate", work.folder / "design", "--evaluate.store", test, *output)
    # An end of an interval is NaN where its resamplings have none.
    return {name: Value.model_validate(metric) for name, metric in work.read("metrics.json")["metrics"].items()}


BENCHMARKS = (
    PublicBenchmark(
        name="sequence_recovery",
        title="Sequences for backbones",
        data="chains of the PDB and AlphaFold models (octavian-ganea/equidock_public, PeptoneLtd/proteinmpnn_ddg, "
        "dauparas/ProteinMPNN, MIT; PDB CC0), 90 % representatives",
        split="train 737, validation 73, test 102 chains; no cluster of 30 % identity on two sides",
        metrics=(
            Metric(
                "median recovery",
                "median recovery of native residues",
                "median recovery, secondary structure",
                {"GVP": 0.402, "PiFold": 0.517},
            ),
        ),
        baseline="the commonest residue of each kind of secondary structure",
        source="GVP and PiFold, trained on CATH 4.2 and tested on its test part",
        differs="published values are of models trained on 25 times as many chains for hours on GPUs, and of CATH's "
        "test chains",
        measure=_recovery,
    ),
)
