"""Masked language models from random weights: the time until ours is as good as the Trainer's best after 20 minutes.

The peer is transformers.Trainer with AdamW as ``run_mlm.py`` documents it (batches of 8 padded proteins, linear decay,
no warm-up), in bf16, by the best of four learning rates, each trained for 20 minutes: the lowest loss on the validation
part is the target. Ours is train_config/masked_lm.yaml on two of that network's four layers, planned for 1/7.5 of that
time, by three seeds.
"""

from collections.abc import Iterator

from benchmarks.harness.stage import Case, Comparison, Contender, Facts, Row, Setting, Stage, WrongWorkError
from benchmarks.programs.masked_lm import MaskedLMBench, row

OURS, TRAINER = "esmeray", "Trainer, AdamW"
CASE = "time to the Trainer's lowest loss"
TRAINER_S = 1200.0
TRAINER_TRIAL_STEPS = 200
SHARE = 1 / 7.5
"""Of the time that the Trainer took that ours is planned for: a seventh is asked, and machines are not steady."""
LEARNING_RATES = (1e-4, 2e-4, 4e-4, 8e-4)
"""Around the best of those tried: at 3e-4 it ends 0.03 bits below 1e-3."""
QUICK_S = 3.0


def _cases(setting: Setting) -> Iterator[Case | Row]:
    bench = MaskedLMBench.prepare(setting)
    planned_s = QUICK_S if setting.quick else TRAINER_S
    course = bench.trainer(LEARNING_RATES[0], TRAINER_TRIAL_STEPS, planned_s)
    by_rate = {}
    for rate in LEARNING_RATES[:1] if setting.quick else LEARNING_RATES:
        setting.note(f"{TRAINER}, learning rate {rate:g}")
        # Planned by the rate before: trials promise more than 20 minutes keep.
        course = by_rate[rate] = bench.trainer(rate, course.steps_in(planned_s), planned_s)
        yield row(f"{TRAINER}, rate {rate:g}", [course])
    rate = min(by_rate, key=lambda rate: by_rate[rate].best.bits)
    best = by_rate[rate].best
    target = 10.0 if setting.quick else best.bits  # a smoke run ends anywhere
    budget_s = best.seconds * SHARE
    steps = bench.ours_in(budget_s)
    setting.note(OURS)
    courses = [bench.ours(steps, budget_s, seed) for seed in bench.seeds]
    yield row(OURS, courses)
    reached_s = [course.seconds_to(target) for course in courses]
    if None in reached_s:
        # After all rows are written: they show by how much it was missed.
        reached = " ".join(f"{course.best.bits:.4f}" for course in courses)
        raise WrongWorkError(f"{reached} bits a masked residue were reached; {target:.4f} is the target")
    contenders = (
        Contender(OURS, iter(reached_s).__next__, kind="value"),  # type: ignore[arg-type]
        Contender(TRAINER, lambda: best.seconds, kind="value"),
    )
    facts: Facts = {"target, bits a masked residue": round(target, 4), "the Trainer's learning rate": rate}
    yield Case(CASE, "s", contenders, better="lower", rounds=len(courses), facts=facts)


STAGE = Stage(
    name="time_to_loss",
    summary="masked LM from random weights: time until it is as good as transformers.Trainer's after 20 minutes",
    cases=_cases,
    comparisons=(Comparison(CASE, OURS, TRAINER, {"cpu": 7.0}),),
    packages=("transformers", "accelerate"),
    distributions=("transformers", "accelerate", "deepspeed"),
)
