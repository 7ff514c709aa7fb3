"""Train an experiment on a Ray cluster, or resume it.

FILE is your own file, or the name of a file in train_config/: esm2ae, masked_lm, masked_lm_150M, my_classifier,
protein_classifier, text_classifier, structdiff, function, function_classifier.

Connects to an available Ray cluster or starts a local one, prepares the data once, trains with one worker per device
and prints the path of the result. The same command resumes an interrupted run of the same name.

Options override the file. Lists take several values. The value none clears an optional setting and empties a list.

Examples:
  esmeray train --config esm2ae --data.source proteins.fasta.gz --run.name first
  esmeray train --config masked_lm --data.source proteins.fasta.gz
  esmeray train --config my_classifier --data.source proteins.csv
  esmeray train --config masked_lm --ray.address HOST:6379 --run.storage_path /shared/runs --data.stage_dir /tmp/stores
  esmeray train --config esm2ae --dry_run
"""

from esmeray.common.errors import ConfigError
from esmeray.tools.grammar import Command, example_of, read_words
from esmeray.tools.train._experiment import trained
from esmeray.training.config import Config, load_config


class Arguments(Command, Config):
    """Options of the command."""

    dry_run: bool = False
    """Print the resolved settings and the plan without starting anything."""


def main(argv: list[str]) -> int:
    words, overrides = read_words(argv, "train", __doc__, Arguments)
    if words.config is None:  # there is no default experiment
        raise ConfigError(f"missing: --config; {example_of(__doc__, 'train')}")
    if not words.dry_run:
        code, _ = trained(words.config, overrides)
        return code
    config = load_config(words.config, overrides)
    config.storage.apply()
    from esmeray.training.launch.driver import dry_run

    return dry_run(config)
