"""The autoencoder's experiment; it measures the feature normalization before the first step."""

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
        # Move it now: the engine, which is built later, takes the parameters as they are then.
        model.to(context.device)
        wanted = 1 if brief else self.settings.model.autoencoder.normalization_tokens
        # Use the first steps of the first epoch over all workers, so that the result does not depend on their number.
        statistics = FeatureStatistics(model.normalization.mean.numel(), context.device)
        seen = 0
        for step in self.batches.epoch(0):
            for batch in step.batches:
                model.measure(batch.to(context.device), statistics)
            # Count the tokens of all workers: if one stopped alone, the others would wait in the next sum.
            seen += control.agree(0, step.num_tokens, stop=False, failed=False).tokens
            if seen >= wanted:
                break
        # Sum over the workers before computing mean and scale: each worker must normalize alike.
        statistics.sums = control.sum(statistics.sums)
        model.normalization.set(statistics)
