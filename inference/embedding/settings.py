"""Outputs and files that the settings of an embedding job mean for a model.

Nothing here needs torch, so that mistakes are reported at once.
"""

from dataclasses import dataclass, field

from common.errors import ConfigError
from common.text import did_you_mean
from dataset.embeddings.formats.base import Format
from dataset.embeddings.formats.registry import FORMATS
from inference.models.facts import ModelFacts, Output
from inference.models.kinds import check_names
from train_config.embed_schema import EmbedSection


@dataclass(frozen=True)
class JobFacts(ModelFacts):
    """A model as a job uses it.

    Attributes:
        outputs: in the order asked for.
        cache_keys: fingerprint of the features of each output that can be cached.
    """

    outputs: tuple[Output, ...] = ()
    cache_keys: dict[str, str] = field(default_factory=dict)


def format_of(settings: EmbedSection, output: Output) -> Format:
    """Format of an output's files: what is no vector of a protein stays in shards, where the format can't hold it."""
    chosen = FORMATS[settings.format]
    return chosen if output.per in chosen.holds else FORMATS["safetensors"]


def check_registered(settings: EmbedSection) -> None:
    """Raise ConfigError for an output or a format that there is not."""
    check_names(settings.outputs)
    known = [name for name, kind in FORMATS.items() if "protein" in kind.holds]
    if settings.format not in known:
        wrong = f"--embed.format {settings.format}: there is no such format{did_you_mean(settings.format, known)}"
        raise ConfigError(f"{wrong}; choose of {', '.join(known)}")


def check_settings(settings: EmbedSection, outputs: tuple[Output, ...]) -> None:
    """Raise ConfigError for settings that don't go together."""
    for output in outputs:
        file_format = format_of(settings, output)
        if settings.dtype not in file_format.dtypes:
            known = ", ".join(file_format.dtypes)
            raise ConfigError(
                f"--embed.dtype {settings.dtype}: {file_format.name}, the format of {output.name}, holds {known}; "
                "choose one of these, or another --embed.format or --embed.outputs"
            )
    if settings.long == "window" and settings.max_length is not None and settings.overlap >= settings.max_length:
        raise ConfigError(f"--embed.overlap {settings.overlap}: must be less than max_length, {settings.max_length}")
