"""Random faults for a number of minutes: ``python -m tests.chaos --seed 1 --minutes 15``, run by ``make chaos``.

Needs root, to create the network of each node and a disk for the runs. The exit code is 1 if the result of a round
differs from the result of the undisturbed round.

Three phases have no rounds and need no root:

- ``--phases bits --flips 300`` flips single bits of files (tests/chaos/bits.py);
- ``--phases clients`` attacks the service (clients.py);
- ``--phases operations`` kills commands at their file operations (operations.py).
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from tests.chaos import bits, clients, operations
from tests.chaos.faults import FAULTS, PHASES, STEPPING
from tests.chaos.rounds import Embedding, Met, Round, Search, Service, Training
from tests.clusters import Machines

Results = tuple[list[str], list[str]]
"""Lines of a table, and a list of problems."""
ORDER = {"loader": -1, "resize": 1, "export": 2}
OTHERS: dict[str, tuple[type[Round], int]] = {
    "embedding": (Embedding, 40),
    "search": (Search, 4),
    "service": (Service, 12),
}
"""Rounds of other commands, and the approximate number of shards, trials or seconds between their faults."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--kinds", nargs="+", choices=[*FAULTS], default=[*FAULTS])
    parser.add_argument("--phases", nargs="+", choices=[*PHASES, *ALONE], default=PHASES)
    parser.add_argument("--spacing", type=int, default=4, help="steps between faults, about")
    parser.add_argument("--flips", type=int, nargs="+", default=[300], help="phase bits: number, or first and last")
    parser.add_argument("--seconds", type=float, default=20, help="phase clients: of an attack")
    parser.add_argument("--only", nargs="+", help="names of attacks, artifacts or commands")
    parser.add_argument("--out", type=Path, help="Markdown file for the table of results")
    given = parser.parse_args(arguments)
    parts = [ALONE[phase] for phase in given.phases if phase in ALONE]
    parts += [disturbed] if {*PHASES} & {*given.phases} else []
    results = [part(given) for part in parts]
    lines = [line for rows, _ in results for line in (*rows, "")]
    wrong = [problem for _, problems in results for problem in problems]
    if given.out:
        given.out.write_text("\n".join(lines))
    print(f"{len(wrong)} wrong: {wrong}")
    return bool(wrong)


def flipped(given: argparse.Namespace) -> Results:
    """Flip single bits and read the files in forks of this process."""
    flips, numbers = list[bits.Flip](), given.flips if len(given.flips) > 1 else [0, given.flips[0] - 1]
    with tempfile.TemporaryDirectory(prefix="chaos-bits-") as folder:
        made = bits.Bits(Path(folder), given.only)
        for number in range(numbers[0], numbers[-1] + 1):
            flips.append(made.flip(given.seed, number))
            print(flips[-1], flush=True)
    return [*bits.table(flips)], [str(flip) for flip in flips if not flip.is_right]


def attacked(given: argparse.Namespace) -> Results:
    """Attack the service, with one attack after the other."""
    trials = list[clients.Trial]()
    with tempfile.TemporaryDirectory(prefix="chaos-clients-") as folder:
        for name in given.only or clients.attacks():
            trials.append(clients.trial(Path(folder), name, given.seconds))
            print([*clients.table(trials)][-1], flush=True)
    return [*clients.table(trials)], [problem for trial in trials for problem in trial.wrong]


def at_operations(given: argparse.Namespace) -> Results:
    """Kill commands at file operations, or let the operations fail, for ``given.minutes``."""
    return operations.preloaded(only=given.only, seed=given.seed, minutes=given.minutes)


def disturbed(given: argparse.Namespace) -> Results:
    """Run rounds of commands with faults for ``given.minutes``."""
    machines, rounds, undisturbed = Machines(), list[Round](), dict[type[Round], Round]()
    phases = [phase for phase in given.phases if phase in PHASES]
    try:
        until = time.monotonic() + 60 * given.minutes
        for faults in schedule(random.Random(given.seed), given.kinds, phases, given.spacing):
            if time.monotonic() > until:
                break
            subject, _ = OTHERS.get(faults[0].phase, (Training, 0))
            if subject not in undisturbed:
                undisturbed[subject] = subject(machines, [], given.spacing).run()
            rounds.append(subject(machines, faults, given.spacing, undisturbed[subject]).run())
            print(rounds[-1], flush=True)
            if not rounds[-1].wrong:
                rounds[-1].close()
    finally:
        for round_ in undisturbed.values():
            round_.close()
        left = machines.close()
    print(f"{len(rounds)} rounds, {sum(len(round_.faults) for round_ in rounds)} faults")
    return [*table(rounds)], [line for round_ in rounds for line in round_.wrong] + left


ALONE: dict[str, Callable[[argparse.Namespace], Results]] = {
    "bits": flipped,
    "clients": attacked,
    "operations": at_operations,
}
"""Phases that need neither root nor machines of their own; they run only if they are named."""


def schedule(chance: random.Random, kinds: list[str], phases: list[str], spacing: int) -> Iterator[list[Met]]:
    """Yield the faults of each round, endlessly: each kind in each of its phases, in random order.

    A round has up to four faults, which share its settings.
    """
    while True:
        pairs = [(kind, phase) for kind in kinds for phase in FAULTS[kind].phases if phase in phases]
        chance.shuffle(pairs)
        while pairs:
            together = [phase if phase in OTHERS else FAULTS[kind].settings for kind, phase in pairs]
            chosen = [pair for pair, name in zip(pairs, together, strict=True) if name == together[0]][:4]
            pairs = [pair for pair in pairs if pair not in chosen]
            faults, gap = list[Met](), OTHERS[together[0]][1] if together[0] in OTHERS else spacing
            for kind, phase in sorted(chosen, key=lambda pair: ORDER.get(pair[1], 0)):
                step = faults[-1].step + chance.randint(gap // 2, gap) if faults else gap // 2
                if FAULTS[kind].what == "checkpoint":  # an older checkpoint has to exist
                    step = max(step, 3 * gap)
                faults.append(Met(kind, phase, 0 if phase in ORDER else step, chance.randint(0, phase in STEPPING)))
            yield faults


def table(rounds: list[Round]) -> Iterator[str]:
    """Yield a Markdown table with a row per kind of fault, and a row for all."""
    yield "| | fault | in | times | s until the next step (longest) | rounds equal |"
    yield "|---|---|---|---|---|---|"
    met = [(type(round_).__name__.lower(), fault.kind, fault, round_) for round_ in rounds for fault in round_.faults]
    met += [(subject, "all", fault, round_) for subject, _, fault, round_ in met]
    for subject, kind in sorted({row[:2] for row in met}):
        faults, own = zip(*[row[2:] for row in met if row[:2] == (subject, kind)], strict=True)
        back = [fault.back_s for fault in faults if fault.back_s is not None]
        seconds = f"{median(back):.1f} ({max(back):.1f})" if back else "–"
        phases = ", ".join({fault.phase: 0 for fault in faults})
        equal = f"{sum(not round_.wrong for round_ in own)}/{len(own)}"
        yield f"| {subject} | {kind} | {phases} | {len(faults)} | {seconds} | {equal} |"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
