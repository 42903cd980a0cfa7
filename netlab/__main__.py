"""The command line of netlab.

python -m netlab --hosts 2 --rate 1gbit -- python train.py
python -m netlab --hosts 4 --rate 100mbit --check
python -m netlab --hosts 2 --rates 1gbit,100mbit --latency 40ms --jitter 2ms --cpus 1,0.25 -- python train.py
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from netlab.lab import MAX_HOSTS, NetLab, NetLabError
from netlab.ranks import run_everywhere

DESCRIPTION = "Run a command on several hosts of this machine, joined by links of a given rate. Needs Linux and root."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: that of the command, or 2 where no lab can be built."""
    parser = argparse.ArgumentParser(prog="python -m netlab", description=DESCRIPTION)
    parser.add_argument("--hosts", type=int, default=2, help=f"number of hosts, 1 to {MAX_HOSTS} (default 2)")
    parser.add_argument("--rate", help="rate of every link, e.g. 100mbit, 1gbit, none (default 1gbit)")
    parser.add_argument("--rates", type=_list, help="rate of each host's link, e.g. 1gbit,100mbit, instead of --rate")
    parser.add_argument("--latency", default="none", help="one-way latency between hosts, e.g. 40ms: ping shows 80 ms")
    parser.add_argument("--jitter", default="none", help="a packet's latency varies by so much, e.g. 2ms")
    parser.add_argument("--cpus", type=_list, help="processors of each host, e.g. 1,0.25; none: no limit")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="processes on each host (default 1)")
    parser.add_argument("--timeout", type=float, help="stop everything after this many seconds")
    parser.add_argument("--check", action="store_true", help="measure the rate between two hosts instead of a command")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and a command, which runs as every rank")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if bool(command) == options.check:
        parser.error("give a command after --, or --check")
    try:
        _check_options(options)
        rate = options.rates or options.rate or "1gbit"
        delays = {"latency": options.latency, "jitter": options.jitter}
        with NetLab(options.hosts, rate, options.ranks_per_host, cpus=options.cpus, **delays) as lab:
            if options.check:
                print(f"{lab.measure() / 1e6:.0f} Mbit/s of goodput at {_told(rate)}")
                return 0
            return run_everywhere(lab, command, options.timeout)
    except NetLabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _check_options(options: argparse.Namespace) -> None:
    """Refuse options that no lab can follow, before a lab is built.

    Raises:
        NetLabError: an option is out of range.
    """
    timeout = options.timeout
    if timeout is not None and not 0 < timeout < math.inf:
        raise NetLabError(
            f"--timeout {timeout:g} is out of range: a finite number of seconds above 0; leave --timeout out "
            "for no limit"
        )
    if options.rate and options.rates:
        raise NetLabError(f"--rate {options.rate} and --rates {_told(options.rates)} both name rates; leave one out")
    if options.check and options.hosts < 2:
        raise NetLabError(f"--check measures between two hosts, and --hosts {options.hosts} is fewer; take --hosts 2")


def _list(text: str) -> list[str]:
    return text.split(",")


def _told(rate: str | list[str]) -> str:
    return rate if isinstance(rate, str) else ",".join(rate)


if __name__ == "__main__":
    sys.exit(main())
