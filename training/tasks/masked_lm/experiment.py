"""The masked language model as the training loop sees it."""

from esmeray.model.tasks.masked_lm import MaskedLM
from esmeray.training.tasks.experiment import ResidueExperiment


class MaskedLMExperiment(ResidueExperiment):
    """The masked language model."""

    masks = True
    new_model = staticmethod(MaskedLM.build)
