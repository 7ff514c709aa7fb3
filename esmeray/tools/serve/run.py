"""Serve models over HTTP: embeddings, classes, mutation scores, and a page to try them.

Models are trained runs and their exports, and folders or hub names of transformers. The page is at http://HOST:PORT/,
the endpoints are described at /docs. OpenAI's Python client and clients of text-embeddings-inference work unchanged.
Without API keys the service listens on 127.0.0.1 only; 'esmeray serve key' makes keys.

Uses an available Ray cluster, or starts one. SIGHUP reloads settings and weights and replaces all replicas while
requests are answered; a model with one replica temporarily needs memory for a second one. Ctrl-C finishes running
requests, then stops; a second Ctrl-C stops at once.

Examples:
  esmeray serve run --serve.models runs/locations facebook/esm2_t6_8M_UR50D
  esmeray serve run --serve.models facebook/esm2_t6_8M_UR50D --serve.indexes proteins.index
  esmeray serve run --config serve --serve.host 0.0.0.0 --serve.access.keys keys.yaml
  esmeray serve run --serve.models esm2_t6_8M --serve.random_weights true --serve.port 8080
"""

from functools import partial

from esmeray.common.command_line import result_console
from esmeray.service.section import ServiceSettings
from esmeray.tools.grammar import Command, parse, read_words
from esmeray.train_config.loading import dump_config, load_settings


class Arguments(Command, ServiceSettings):
    """Options of the command."""

    dry_run: bool = False
    """Print the resolved settings without starting anything."""


def main(argv: list[str]) -> int:
    arguments, _ = parse(argv, "serve run", __doc__, Arguments)
    # Keep file and options apart: SIGHUP reads the file again, and the options override it again.
    words, overrides = read_words(argv, "serve run", __doc__, Arguments)
    load = partial(load_settings, ServiceSettings, words.config, overrides)
    if arguments.dry_run:
        print(dump_config(load()), end="")
        return 0
    from esmeray.service.launch import run  # imported here: it loads Ray

    # Pass the function instead of the settings: the file may have changed at SIGHUP.
    return run(load, partial(result_console().print, markup=False))
