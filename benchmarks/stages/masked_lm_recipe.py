"""Contribution of each ingredient of train_config/masked_lm.yaml: the loss without it, after the same tokens.

Each is trained as ``time_to_loss`` trains ours, by three seeds, for the steps that 160 s have room for; tokens a second
are beside the loss. Differences are taken seed by seed, which share the order of the proteins and the random weights.
"""

from collections.abc import Iterator
from statistics import mean

from benchmarks.harness.stage import Row, Setting, Stage
from benchmarks.programs.masked_lm import MaskedLMBench, row
from esmeray.train_config.loading import Overrides

OURS = "esmeray"
BUDGET_S, QUICK_S = 160.0, 1.0
"""The first is 1/7.5 of the 20 minutes that the Trainer is given."""
WITHOUT: dict[str, Overrides] = {
    "": {},
    "Muon": {("training", "optimizer"): "adamw", ("training", "learning_rate"): 2e-3},
    "MASK alone": {
        ("model", "masked_lm", "mask_token_share"): 0.8,
        ("model", "masked_lm", "random_token_share"): 0.1,
    },
    "more masks first": {("model", "masked_lm", "first_mask_share"): None},
    "a long decay": {("training", "decay_share"): 0.2},
}
"""Settings that put an ingredient back to its default; first comes the recipe as it is."""


def _cases(setting: Setting) -> Iterator[Row]:
    bench = MaskedLMBench.prepare(setting)
    budget_s = QUICK_S if setting.quick else BUDGET_S
    steps = bench.ours_in(budget_s)
    all_bits: list[float] = []
    # The same steps for all, and not the same time: an ingredient that costs speed is judged by what it contributes.
    for without, changed in WITHOUT.items():
        name = f"{OURS} without {without}" if without else OURS
        setting.note(name)
        courses = [bench.ours(steps, budget_s, seed, changed) for seed in bench.seeds]
        bits = [course.points[-1].bits for course in courses]
        all_bits = all_bits or bits
        more = [changed_to - of_all for changed_to, of_all in zip(bits, all_bits, strict=True)]
        spread = f"{mean(more):+.4f} ({min(more):+.4f} to {max(more):+.4f})"
        yield row(name, courses) | {"beside all ingredients": spread if without else None}


STAGE = Stage(
    name="masked_lm_recipe",
    summary="masked LM from random weights, after the same tokens: the loss without each ingredient of its recipe",
    cases=_cases,
    distributions=("transformers", "deepspeed"),
)
