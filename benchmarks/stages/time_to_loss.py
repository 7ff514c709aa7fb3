"""Masked language models from random weights: time until Muon is as good as the Trainer after 20 minutes.

The peer is transformers.Trainer with AdamW as ``run_mlm.py`` documents it (batches of 8 padded proteins, linear decay,
no warm-up), in bf16, with the best of four learning rates, each trained for 20 minutes. Its loss on held-out proteins
at the end is the target. Ours is train_config/masked_lm.yaml with two of that network's four layers, planned for 1/7.5
of that time, with three seeds. The clock counts the steps, including waiting for data; building the model and the
evaluation are left out on both sides. Held-out proteins may be relatives of training proteins, for both sides alike.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.harness.comparison import compare
from benchmarks.harness.inputs import make_store, read_proteins, write_fasta
from benchmarks.harness.stage import Row, Setting, Stage, WrongWorkError
from benchmarks.peers.transformers_embedding import write_model
from benchmarks.programs.trainings import TOY, Training, in_process
from esmeray.train_config.loading import Overrides
from esmeray.training.config import load_config

OURS, TRAINER = "esmeray", "Trainer, AdamW"
NETWORK = {"layers": 4, "hidden_size": 256, "heads": 4}
OUR_LAYERS = 2
MAX_LENGTH = 510
TRAINER_S, QUICK_S = 1200.0, 3.0
TRIAL_STEPS = {TRAINER: 200, OURS: 60}
SHARE = 1 / 7.5
"""Planned fraction of the Trainer's time. A seventh is the goal; the speed of machines varies."""
LEARNING_RATES = (1e-4, 2e-4, 4e-4, 8e-4)
SEEDS = (0, 1, 2)
HELD_OUT = 20
"""One protein in this number is held out."""


def _rows(setting: Setting) -> Iterator[Row]:
    sequences = read_proteins(setting)[: 200 if setting.quick else None]
    others = [sequence for number, sequence in enumerate(sequences) if number % HELD_OUT]
    training = write_fasta(setting.folder / "training.fasta", others)
    held_out = str(write_fasta(setting.folder / "held_out.fasta", sequences[::HELD_OUT]))
    store = str(make_store(training, setting.folder))
    network = TOY if setting.quick else NETWORK
    weights = write_model(setting.folder / "weights", "esm2_t6_8M", **network)

    def trainer(rate: float, steps: int) -> Training:
        setting.note(f"{TRAINER}, learning rate {rate:g}, {steps} steps")
        arguments = {"max_steps": steps, "learning_rate": rate}
        paths = {"weights": weights, "fasta": str(training), "held_out": held_out}
        return in_process("trainer", setting.folder, residues=MAX_LENGTH, arguments=arguments, **paths)

    def ours(seed: int, steps: int) -> Training:
        setting.note(f"{OURS}, seed {seed}, {steps} steps")
        overrides: Overrides = {
            **{("model", "backbone", key): size for key, size in network.items()},
            ("model", "backbone", "layers"): OUR_LAYERS,
            ("run", "seed"): seed,
            ("data", "max_length"): MAX_LENGTH,
            # Schedules end with the steps.
            ("training", "max_steps"): steps,
            ("model", "masked_lm", "mask_share_steps"): steps,
        }
        config = load_config("train_config/masked_lm.yaml", overrides).model_dump(mode="json")
        return in_process("ours", setting.folder, config=config, store=store, held_out=held_out)

    last = trainer(LEARNING_RATES[0], TRIAL_STEPS[TRAINER])
    trained = {}
    for rate in LEARNING_RATES[:1] if setting.quick else LEARNING_RATES:
        # Planned with the speed of the training before: a short trial is faster than 20 minutes are.
        last = trained[rate] = trainer(rate, _steps_in(last, QUICK_S if setting.quick else TRAINER_S))
        yield _row(f"{TRAINER}, rate {rate:g}", last)
    best_rate = min(trained, key=lambda rate: trained[rate].bits)
    best = trained[best_rate]
    steps = _steps_in(ours(0, TRIAL_STEPS[OURS]), best.seconds * SHARE)
    seconds = []
    for seed in SEEDS[: 1 if setting.quick else None]:
        own = ours(seed, steps)
        yield _row(f"{OURS}, seed {seed}", own)
        if own.bits > best.bits and not setting.quick:  # a smoke run ends anywhere
            raise WrongWorkError(f"{own.bits:.4f} bits per masked residue were reached; {best.bits:.4f} is the target")
        seconds.append(own.seconds)
    setting.facts.update({"target, bits per masked residue": best.bits, "the Trainer's learning rate": best_rate})
    contenders = {OURS: iter(seconds).__next__, TRAINER: lambda: best.seconds}
    options: dict[str, Any] = {"floors": {TRAINER: 7.0}, "better": "lower", "rounds": len(seconds)}
    yield from compare(setting, "time to the Trainer's loss", "s", contenders, **options)


def _steps_in(training: Training, seconds: float) -> int:
    """Return how many steps fit the seconds at the mean rate of a training."""
    return max(2, int(seconds / training.seconds * len(training.steps)))


def _row(name: str, training: Training) -> Row:
    tokens = sum(step.tokens for step in training.steps)
    rate = round(tokens / training.seconds)
    return {"training": name, "seconds": training.seconds, "tokens/s": rate, "bits per masked residue": training.bits}


STAGE = Stage(
    name="time_to_loss",
    summary="masked LM from random weights: time until Muon is as good as transformers.Trainer after 20 minutes",
    rows=_rows,
    packages=("transformers", "accelerate"),
    distributions=("transformers", "accelerate", "deepspeed"),
)
