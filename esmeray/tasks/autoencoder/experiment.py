"""The autoencoder as the training loop sees it: its normalisation is measured before the first step."""

from esmeray.cluster.collective import ControlGroup, WorkerContext
from esmeray.model.heads.normalization import FeatureStatistics
from esmeray.model.task_model import TaskModel
from esmeray.tasks.autoencoder.model import ESM2Autoencoder
from esmeray.tasks.experiment import ResidueExperiment


class AutoencoderExperiment(ResidueExperiment):
    """The autoencoder."""

    new_model = staticmethod(ESM2Autoencoder.build)

    def prepare(self, model: TaskModel, context: WorkerContext, control: ControlGroup, *, brief: bool = False) -> None:
        """Measure mean and scale of the features; from a single step if ``brief``."""
        assert isinstance(model, ESM2Autoencoder)
        # Before the engine, which moves it otherwise: that takes the parameters as they are by then.
        model.to(context.device)
        wanted = 1 if brief else self.settings.model.autoencoder.normalization_tokens
        # Fixed from the first steps of the first epoch, all workers together, so that their number changes nothing.
        statistics = FeatureStatistics(model.normalization.mean.numel(), context.device)
        seen = 0
        for step in self.batches.epoch(0):
            for batch in step.batches:
                model.measure(batch.to(context.device), statistics)
            # Tokens of all workers: one that stopped alone would leave the others waiting in the next sum.
            seen += control.agree(0, step.num_tokens, stop=False, failed=False).tokens
            if seen >= wanted:
                break
        # Added up before mean and scale are taken: each worker must normalise alike.
        statistics.sums = control.sum(statistics.sums)
        model.normalization.set(statistics)
