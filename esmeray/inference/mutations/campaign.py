"""Simulate campaigns on the mutants of a fitted model, and compare the share of the best ones found with baselines."""

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
TOP_SHARE = 0.01
"""Share of all mutants that counts as the best, which campaigns try to find."""
_COLOURS = {PROPOSALS: BLUE, PRIOR: ORANGE, RANDOM: GREY}


def campaigns(fitted: Fitted, section: MutationCampaignSection) -> pd.DataFrame:
    """Table with a row per protein, round and way of choosing mutants: the share of the best mutants found so far."""
    rows = []
    with record_bar("campaigns") as bar:
        for done, part in enumerate(fitted.proteins, 1):
            data = part.data(fitted.section.first_position)
            size = len(data.values)
            top = np.argsort(-data.values, kind="stable")[: max(1, round(TOP_SHARE * size))]
            by_prior = np.argsort(-data.features.parts["prior"][:, 0], kind="stable")
            proposed = _proposed(data, section)
            for number in range(1, section.rounds + 1):
                measured = number * section.number
                for way, order in ((PROPOSALS, proposed), (PRIOR, by_prior)):
                    rows.append((part.name, number, way, np.isin(top, order[:measured]).mean()))
                # The expected share, without noise.
                rows.append((part.name, number, RANDOM, min(1.0, measured / size)))
            bar(done / len(fitted.proteins), done)
    return pd.DataFrame(rows, columns=["protein", "round", "way", "found"])


def _proposed(data: Measured, section: MutationCampaignSection) -> NDArray[np.int64]:
    """Rows in the order in which they are measured."""
    known = np.empty(0, np.int64)
    for _ in range(section.rounds):
        rest = np.setdiff1d(np.arange(len(data.values)), known)
        # In the first round nothing is measured, so that the zero-shot score alone predicts the values.
        process = Posterior(data.features[known], data.values[known], replicates_N=data.replicates[known])
        plate = choose(process, data.features[rest], section.number, section.strategy, section.seed)
        known = np.append(known, rest[plate])
    return known


def draw_campaigns(path: Path, rounds: pd.DataFrame) -> None:
    """Draw the share found by round, averaged over proteins."""
    with picture(path, 7.0, 4.5, "Of the best mutants, found") as figure:
        axes = figure.subplots()
        style_steps(axes)
        for way, colour in _COLOURS.items():
            shares = rounds[rounds["way"] == way].groupby("round")["found"].mean()
            axes.plot(shares.index, shares, "o-", color=colour, label=way)
        axes.set(xlabel="round", ylabel="share of the best mutants", ylim=(0, None))
        legend(axes)


def campaign_lines(rounds: pd.DataFrame) -> list[str]:
    """Table of the share found after the last round, and its ratio to the baselines."""
    last = rounds[rounds["round"] == rounds["round"].max()]
    shares = last.pivot_table(index="protein", columns="way", values="found", sort=False)
    if len(shares) > 1:
        shares.loc["mean"] = shares.mean()
    rows = []
    for protein, row in shares.iterrows():
        shares_found = [f"{row[way]:.3f}" for way in (PROPOSALS, PRIOR, RANDOM)]
        ratios = [f"{row[PROPOSALS] / row[way]:.1f}" if row[way] else "–" for way in (PRIOR, RANDOM)]
        rows.append([str(protein), *shares_found, *ratios])
    return table_lines(["protein", PROPOSALS, PRIOR, RANDOM, f"times {PRIOR}", f"times {RANDOM}"], rows)
