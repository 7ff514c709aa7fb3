"""Settings of sequence diffusion: structures, their encoder, and the diffusion itself."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from esmeray.train_config.natures import PATH, UNSEEN
from esmeray.train_config.section import Channels, NonNegativeFloat, NonNegativeInt, PositiveInt, Section, Share


class PredictionsSection(Section):
    """Predicted structures of sequences that have none of their own. With ``model`` they are predicted beside training,
    on Ray, in the order in which it wants them."""

    folder: Annotated[str | None, PATH] = None
    """Folder of predictions, as 'esmeray design fold' makes it."""
    on_miss: Literal["error", "null", "wait"] = "error"
    """Sequences without a prediction. error: refuse; null: train without their structure; wait: until it is there, if
    they are no longer than data.max_length."""
    model: str | None = None
    """Folder or hub name of the predictor's weights. none: nobody predicts beside training."""
    predictor: str = "esmfold"
    """Kind of predictor: esmfold, esmfold2, or one of predictor_module."""
    predictor_module: list[str] = Field([])
    """Modules to import, which register further kinds."""
    workers: PositiveInt = 1
    """Actors that predict structures beside training."""
    cpus_per_worker: NonNegativeInt = 0
    """CPU cores that are reserved for an actor, beside those of training."""
    gpus_per_worker: NonNegativeFloat = 1.0
    """GPUs of an actor where the cluster has some; they must be free beside those of training."""
    tokens: PositiveInt = 1024
    """Residues of a batch of predictions, at most."""

    @model_validator(mode="after")
    def _fits_together(self) -> "PredictionsSection":
        if self.folder is None and (self.on_miss != "error" or self.model is not None):
            raise ValueError("on_miss and model need a folder that keeps predictions: set folder, too")
        if self.on_miss == "error" and self.model is not None:
            raise ValueError("with a predictor beside training set on_miss to wait or null")
        return self


CaOnly = Literal["error", "skip", "complete"]


class StructuresSection(Section):
    """Structure files of the source: PDB, mmCIF and BinaryCIF, also .gz."""

    chains: str = "each"
    """each: a record for each protein chain; first: the first of each file; complex: all chains of a file as one
    record; or names of chains, as A,B, a record for each."""
    min_residues: PositiveInt = 10
    """Chains of fewer residues with coordinates are left out and counted."""
    ca_only: CaOnly = "error"
    """Chains of which CA atoms alone are known. error: refuse; skip: leave out, counted; complete: place N, C and O."""
    max_bytes: Annotated[PositiveInt, UNSEEN] = 1_000_000_000
    """Most bytes of a file, uncompressed; a larger one is refused while it is read."""
    max_atoms: Annotated[PositiveInt, UNSEEN] = 5_000_000
    """Most atoms of a file's models that are read, twice those of the largest entry of the PDB."""
    labels: str | None = None
    """CSV or TSV file with columns id and label: classes to condition on."""
    validation_source: list[str] = Field([])
    """Structure files, folders or globs to hold out, in place of data.validation_share."""


class StructureEncoderSection(Section):
    """Network on the graph of near residues, as ProteinMPNN's encoder (Dauparas et al. 2022)."""

    hidden_size: Channels = 128
    """Channels of the structure encoder."""
    layers: PositiveInt = 3
    """Layers of messages between neighbouring residues."""
    neighbours: PositiveInt = 48
    """Nearest residues that each one gets messages from."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of channels dropped in training."""


class DiffusionSection(Section):
    """Masked diffusion of sequences (Sahoo et al. 2024, MDLM; Wang et al. 2024, DPLM): at time t in (0, 1] each residue
    is hidden with a probability that the schedule gives, and all are predicted at once."""

    schedule: Literal["linear", "cosine"] = "linear"
    """Share of hidden residues at time t. linear: t; cosine: 1 - cos(t pi / 2)."""
    weighting: Literal["none", "linear", "elbo"] = "linear"
    """Weight of a sequence of which a share m is hidden. none: 1; linear: 1 - m, DPLM's; elbo: 1 / m, the likelihood
    bound of MDLM. Each divided by its mean."""
    drop_share: Share = 0.1
    """Share of sequences trained without their structure, and of those without their label, for guidance."""
    noise: NonNegativeFloat = 0.1
    """Standard deviation in Å of the noise on coordinates in training; ProteinMPNN takes 0.02 to 0.2."""
    min_confidence: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Residues of predicted structures with less confidence (pLDDT) count as without coordinates."""
    adapter_size: Channels = 256
    """Channels of the adapter's feed-forward (LM-Design, Zheng et al. 2023)."""
    encoder: StructureEncoderSection = StructureEncoderSection()
