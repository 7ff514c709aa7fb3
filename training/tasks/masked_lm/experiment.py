"""The masked language model as the training loop sees it."""

from model.tasks.masked_lm import MaskedLM
from train_config.schema import MaskedLMSection, ModelSection
from training.tasks.residues.experiment import ResidueExperiment


class MaskedLMExperiment(ResidueExperiment):
    """The masked language model."""

    new_model = staticmethod(MaskedLM.build)

    @staticmethod
    def masking(section: ModelSection) -> MaskedLMSection | None:
        return section.masked_lm
