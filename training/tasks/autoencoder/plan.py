"""The autoencoder before training."""

from model.cost.memory import count_autoencoder_parameters
from training.tasks.residues.plan import ResiduePlan


class AutoencoderPlan(ResiduePlan):
    """The autoencoder."""

    count_parameters = staticmethod(count_autoencoder_parameters)
