"""Simulate rounds of proposals on a measured assay, compared with the zero-shot score and with random choice.

In each round the mutants that esmeray mutations propose would choose get their measured values from the table, and the
model is fitted again. The first round has the zero-shot score only. Replicates of a mutant are averaged, so that plates
and shares count mutants. The metric is the share of the best mutants that is found. Several proteins are given as in
esmeray mutations fit. Writes a folder: campaign.csv with every round, campaign.png and report.md.

Examples:
  esmeray mutations campaign facebook/esm2_t12_35M_UR50D --campaign.sequence wild.fasta --campaign.table measured.csv \
--campaign.output campaign
  esmeray mutations campaign facebook/esm2_t12_35M_UR50D --campaign.sequence wild.fasta --campaign.table measured.csv \
--campaign.output campaign --campaign.rounds 3 --campaign.number 48 --campaign.strategy thompson
"""

from functools import cache

from esmeray.inference.mutations.section import MutationCampaignSection
from esmeray.run_folder.job import unfinished
from esmeray.tools.grammar import OutputWriter, command
from esmeray.tools.mutations.score import OptionalMaskedModelPath


@command("mutations campaign", __doc__, made_by="simulate_campaign")
def main(campaign: MutationCampaignSection, writer: OutputWriter, model: OptionalMaskedModelPath = None) -> None:
    from esmeray.inference.mutations.table import read_mutants  # here: it loads pandas

    writer.refuse_existing(campaign.output)
    with unfinished(campaign.output, f"mutations campaign of {model}") as folder:
        table = read_mutants(campaign, folder, "campaign", campaign.numbers("campaign"))
        from esmeray.inference.mutations.campaign import campaign_lines, campaigns, draw_campaigns
        from esmeray.inference.mutations.fitted import measured_parts  # here: they load torch and Matplotlib
        from esmeray.inference.mutations.job import Scorer

        open_scorer = cache(lambda: Scorer(str(model), campaign, folder))
        rounds = campaigns(measured_parts(table, campaign, open_scorer, model), campaign)
        lines = campaign_lines(rounds)
        with writer.folder(campaign.output) as building:
            rounds.to_csv(building / "campaign.csv", index=False)
            (building / "report.md").write_text("\n".join(["# Campaign", "", *lines, ""]), encoding="utf-8")
            draw_campaigns(building / "campaign.png", rounds)
    print("\n".join([*table.lines(), *lines, f"written: {campaign.output}"]))
