"""One training run: ``python recipes/run.py +exp=quickstart strategy=gqsgd logger=wandb``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `recipes` is importable from every folder

from recipes.opening import INTERRUPTED, announce, missing_packages_in_one_line, print_in_any_locale, say, speaks

#: Options to which Hydra prints an answer, which e.g. of --cfg is YAML for a file, and after which nothing is trained.
_QUESTIONS = {"-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion"}


def start() -> None:
    """Train as the command line of this process says."""
    if not speaks(os.environ):
        # An interrupt on the terminal reaches all processes. The first process ends the others.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    print_in_any_locale()
    try:
        if not _QUESTIONS & {word.partition("=")[0] for word in sys.argv[1:]}:
            is_sweep = not {"-m", "--multirun"}.isdisjoint(sys.argv[1:])
            announce("run.py", "one training of each combination" if is_sweep else "one training", sys.argv[1:])
        with missing_packages_in_one_line("run.py"):
            # Here, not above: the first word comes before everything that takes time.
            from recipes.launch.command_line import run

            run()
    except KeyboardInterrupt:
        # A training that is interrupted says itself how to go on: nothing but checks and imports ends here.
        say("interrupted before the training; nothing has been written")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    start()
