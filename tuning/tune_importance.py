"""Which settings decide the speed: their share in what makes the trials of a search differ.

In: trials. Out: a share for each varied setting, together 1, and how they were found: fANOVA (Hutter et
al. 2014, Optuna's) where there are enough trials for its forest, and otherwise the share of the variance that lies
between a setting's values (eta squared, of one setting at a time). Trials that were stopped early count with the speed
that they had: without them, a setting whose slow value was always given up early would seem to matter little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from tuning.tune_trials import Trial, Value, measured, speed, values_of, varied

FEWEST_TRIALS = 12
"""Below, a forest of trees fits its own noise."""


def importance(trials: Sequence[Trial]) -> tuple[dict[str, float], str]:
    """Share of each varied setting, largest first, and how it was found; nothing where nothing can be said.

    Args:
        trials: of a search; those without a speed are passed over.
    """
    known = measured(trials)
    names = [name for name in varied(known, {}) if all(name in trial.settings for trial in known)]
    if len(known) < 3 or not names or len({speed(trial) for trial in known}) == 1:
        return {}, ""
    if len(known) >= FEWEST_TRIALS:
        shares, method = _fanova(known, names), f"fANOVA over {len(known)} trials"
    else:
        shares, method = _between_values(known, names), f"variance between values, {len(known)} trials"
    total = sum(shares.values())
    if not total > 0:
        return {}, ""
    return {name: shares[name] / total for name in sorted(shares, key=shares.__getitem__, reverse=True)}, method


def _fanova(known: Sequence[Trial], names: Sequence[str]) -> dict[str, float]:
    import optuna

    choices = {name: [_choice(value) for value in values_of(name, known, {})] for name in names}
    distributions = {name: optuna.distributions.CategoricalDistribution(choices[name]) for name in names}
    with _quiet_optuna():
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
        for trial in known:
            parameters = {name: _choice(trial.settings[name]) for name in names}
            study.add_trial(
                optuna.trial.create_trial(params=parameters, distributions=dict(distributions), value=speed(trial))
            )
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        shares = optuna.importance.get_param_importances(study, evaluator=evaluator, params=list(names))
    return {name: float(share) for name, share in shares.items()}


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Optuna logs each study that it makes, which is none of the reader's business here."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def _choice(value: Value) -> str:
    """Values that compare alike but differ in type, such as 1 and True, must stay apart."""
    return repr(value)


def _between_values(known: Sequence[Trial], names: Sequence[str]) -> dict[str, float]:
    """Eta squared of each setting: variance of the means of its values, as a share of all."""
    speeds = np.array([speed(trial) for trial in known])
    total = float(((speeds - speeds.mean()) ** 2).sum())
    shares = {}
    for name in names:
        groups: dict[str, list[float]] = {}
        for trial in known:
            groups.setdefault(_choice(trial.settings[name]), []).append(speed(trial))
        between = sum(len(group) * (np.mean(group) - speeds.mean()) ** 2 for group in groups.values())
        shares[name] = float(between) / total
    return shares
