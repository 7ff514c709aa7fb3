"""Simulate rounds of proposals on a measured assay, compared with the zero-shot score and with random choice.

A model made by esmeray mutations fit has the measured mutants. In each round the mutants that esmeray
mutations propose would choose get their measured values, and the weights are learnt again. The first round has the
zero-shot score only. The metric is the share of the best mutants that is found. Writes a folder: campaign.csv with
every round, campaign.png and report.md.

Examples:
  esmeray mutations campaign fitted --campaign.output campaign
  esmeray mutations campaign fitted --campaign.output campaign --campaign.rounds 3 --campaign.number 48 \
--campaign.strategy thompson
"""

from esmeray.inference.mutations.section import MutationCampaignSection
from esmeray.tools.grammar import OutputWriter, command
from esmeray.tools.mutations.propose import FittedModelPath


@command("mutations campaign", __doc__, made_by="simulate_campaign")
def main(model: FittedModelPath, campaign: MutationCampaignSection, writer: OutputWriter) -> None:
    writer.refuse_existing(campaign.output)
    from esmeray.inference.mutations.campaign import campaign_lines, campaigns, draw_campaigns
    from esmeray.inference.mutations.fitted import open_fitted  # here: they load torch and Matplotlib

    rounds = campaigns(open_fitted(model), campaign)
    lines = campaign_lines(rounds)
    with writer.folder(campaign.output) as building:
        rounds.to_csv(building / "campaign.csv", index=False)
        (building / "report.md").write_text("\n".join(["# Campaign", "", *lines, ""]), encoding="utf-8")
        draw_campaigns(building / "campaign.png", rounds)
    print("\n".join([*lines, f"written: {campaign.output}"]))
