"""The experiment of the masked language model."""

from esmeray.tasks.experiment import ResidueExperiment
from esmeray.tasks.masked_lm.model import MaskedLM
from esmeray.tasks.masked_lm.section import MaskedLMSection


class MaskedLMExperiment(ResidueExperiment):
    """The masked language model."""

    new_model = staticmethod(MaskedLM.build)

    def masking(self) -> MaskedLMSection:
        return self.settings.model.masked_lm
