"""Simulate campaigns on the mutants of a fitted model, and compare the share of the best ones found with baselines.

Shape legend: N mutants of the assay, R rounds.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esmeray.common.figure_style import BLUE, GREY, ORANGE, legend, picture, style_steps
from esmeray.common.progress import record_bar
from esmeray.inference.classify.report import table_lines
from esmeray.inference.mutations.features import Measured
from esmeray.inference.mutations.fitted import Fitted
from esmeray.inference.mutations.gaussian_process import Posterior
from esmeray.inference.mutations.proposal import choose
from esmeray.inference.mutations.section import MutationCampaignSection

PROPOSALS = "proposals"
PRIOR = "greedy by the zero-shot score"
RANDOM = "random"
REPEATS = 3
"""Campaigns with different seeds, whose range shows the influence of chance."""
TOP_SHARE = 0.01
"""Share of all mutants that counts as the best, which campaigns try to find."""
_COLOURS = {PROPOSALS: BLUE, PRIOR: ORANGE, RANDOM: GREY}


def campaigns(fitted: Fitted, section: MutationCampaignSection) -> pd.DataFrame:
    """Table with a row per protein, strategy, repeat and round: the share of the best mutants found so far."""
    rows = []
    parts = [part.data(fitted.section.first_position) for part in fitted.proteins]
    runs = [(part, repeat) for part in parts for repeat in range(REPEATS)]
    with record_bar("campaigns") as bar:
        for done, (part, repeat) in enumerate(runs):
            size = len(part.values)
            random = np.random.default_rng(section.seed + repeat)
            by_prior = np.argsort(-part.features.parts["prior"][:, 0], kind="stable")
            # Without sampling, all repeats propose the same mutants.
            if repeat == 0 or section.strategy == "thompson":
                proposed = _proposed(part, section, repeat)
            ways = {PROPOSALS: proposed, PRIOR: by_prior, RANDOM: random.permutation(size)}
            top = np.argsort(-part.values, kind="stable")[: max(1, round(TOP_SHARE * size))]
            for way, order in ways.items():
                for number in range(1, section.rounds + 1):
                    rows.append(
                        (part.protein.name, way, repeat, number, np.isin(top, order[: number * section.number]).mean())
                    )
            bar((done + 1) / len(runs), done + 1)
    return pd.DataFrame(rows, columns=["protein", "way", "repeat", "round", "found"])


def _proposed(part: Measured, section: MutationCampaignSection, repeat: int) -> NDArray[np.int64]:
    """Rows in the order in which they are measured."""
    known = np.empty(0, np.int64)
    for _ in range(section.rounds):
        rest = np.setdiff1d(np.arange(len(part.values)), known)
        # In the first round nothing is measured, so that the zero-shot score alone predicts the values.
        process = Posterior(part.features[known], part.values[known], replicates_N=part.replicates[known])
        plate = choose(process, part.features[rest], section.number, section.strategy, section.seed + repeat)
        known = np.append(known, rest[plate])
    return known


def draw_campaigns(path: Path, rounds: pd.DataFrame) -> None:
    """Draw the share found by round, averaged over proteins. Bands span the lowest to the highest repeat."""
    with picture(path, 7.0, 4.5, "Of the best mutants, found") as figure:
        axes = figure.subplots()
        style_steps(axes)
        for way, colour in _COLOURS.items():
            by_repeat = rounds[rounds["way"] == way].groupby(["round", "repeat"])["found"].mean().unstack()
            axes.plot(by_repeat.index, by_repeat.mean(axis=1), "o-", color=colour, label=way)
            axes.fill_between(by_repeat.index, by_repeat.min(axis=1), by_repeat.max(axis=1), color=colour, alpha=0.2)
        axes.set(xlabel="round", ylabel="share of the best mutants", ylim=(0, None))
        legend(axes)


def campaign_lines(rounds: pd.DataFrame) -> list[str]:
    """Table of the share found after the last round, with its range over repeats and its ratio to the baselines."""
    last = rounds[rounds["round"] == rounds["round"].max()].drop(columns="round")
    shares = last.pivot_table(index="protein", columns="way", values="found", sort=False)
    spread = last[last["way"] == PROPOSALS].groupby("protein", sort=False)["found"].agg(["min", "max"])
    if len(shares) > 1:
        shares.loc["mean"] = shares.mean()
        spread.loc["mean"] = last[last["way"] == PROPOSALS].groupby("repeat")["found"].mean().agg(["min", "max"])
    rows = [
        [
            str(protein),
            f"{row[PROPOSALS]:.3f} ({spread['min'][protein]:.3f} to {spread['max'][protein]:.3f})",
            *(f"{row[way]:.3f}" for way in (PRIOR, RANDOM)),
            *(f"{row[PROPOSALS] / row[way]:.1f}" if row[way] else "–" for way in (PRIOR, RANDOM)),
        ]
        for protein, row in shares.iterrows()
    ]
    return table_lines(["protein", PROPOSALS, PRIOR, RANDOM, f"times {PRIOR}", f"times {RANDOM}"], rows)
