"""Goodput: samples that enter the model while ranks are killed, are slow, and have slow links.

    python -m benchmarks.goodput --seconds 60 --save

Four hosts (see `netlab`; root on Linux with iproute2): the last one has a quarter of the others' processor time, the
last but one a link that is ten times slower. A random host's rank is killed about every 20 s, and may start again 5 s
later. Goodput is the number of samples that enter the merged model each second, over that of hosts alike that train
alone meanwhile, each at its own speed and without faults. Samples of a merge that a restart undoes do not count.

Every way is run with the first seed, and ours with all of them. The speed of a machine drifts, so there is a twin of
each kind of host, with as much of the same core at the same time, whose rank trains alone. The bound is the goodput of
members who lose nothing but the time in which a host is away, and what a killed rank has learnt since its last merge.
Ways with a lighthouse fork a rank that comes back from a process that has imported everything; torchrun restarts all
ranks, which import again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.goodput_rank import EVERY, EVERY_VARIABLE, ROUND_S
from benchmarks.report import Report, command_line, present
from netlab.lab import NetLab, NetLabError
from pictures.style import drawn

RATES = ["1gbit", "1gbit", "100mbit", "1gbit"]
#: Processors of each host, and its core. With the twins, a tenth of a core is left for all else.
CPUS = ["0.3", "0.3", "0.3", "0.075"]
CORES = [0, 1, 0, 1]
#: Seconds between two kills, give or take half a round, and until the killed rank may start again.
EVERY_S, DOWN_S = 20.0, 5.0
#: Seeds of the schedules of kills.
SEEDS = [0, 1, 2, 3, 4]
#: Seconds of a trial of a number of steps between two averages, and the numbers that are tried.
TRIAL_S, TRIALS = 45.0, (16, 64, 256)
#: Seconds for which ranks may take to make their first merge.
START_S = 180.0
LIGHTHOUSE_PORT, RENDEZVOUS_PORT = 29510, 29511
#: A line of the journal of `benchmarks.goodput_rank`.
Line = dict[str, Any]
#: Seconds of a run, and the loss at each of them.
Curve = dict[str, list[float]]


def _plain(lab: NetLab, host: int) -> list[str]:
    """Nobody starts a rank again but this benchmark."""
    return [sys.executable]


def _torchrun(lab: NetLab, host: int) -> list[str]:
    """torchrun starts all ranks again when one is gone."""
    options = [
        f"--nnodes={len(RATES)}",
        "--nproc-per-node=1",
        "--max-restarts=1000",
        "--monitor-interval=0.1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={lab.address(0)}:{RENDEZVOUS_PORT}",
        f"--rdzv-conf=is_host={int(host == 0)}",
        f"--local-addr={lab.address(host)}",
        "--rdzv-id=goodput",
    ]
    return [sys.executable, "-m", "torch.distributed.run", *options]


class Way(NamedTuple):
    """A way to train.

    Attributes:
        start: what begins the command line of a host.
        join_s: how long members wait for one that is alive and does not come to torchft's lighthouse; None: there is
            no lighthouse. Where members count steps, those that wait for a slow one lose time, so it is short. Rounds
            by the clock need more than a round.
        is_tuned: whether numbers of steps between two averages are tried first.
        every: that number.
    """

    start: Callable[[NetLab, int], list[str]]
    join_s: float | None = None
    is_tuned: bool = False
    every: int = EVERY

    @property
    def has_lighthouse(self) -> bool:
        """Whether ranks find each other through a lighthouse."""
        return self.join_s is not None


#: The ways, by their names in `benchmarks.goodput_rank.WAYS`. Each is a function there, and a line here.
WAYS = {
    "ddp": Way(_torchrun),
    "lock_step": Way(_torchrun),
    "torchft_diloco": Way(_plain, join_s=2.0, is_tuned=True),
    "torchft_diloco_4bit": Way(_plain, join_s=2.0, is_tuned=True),
    "elastic": Way(_plain, join_s=20.0),
}


#: How the ranks of twins are started.
_ALONE = Way(_plain)


class Run:
    """The ranks of one way on hosts of a lab.

    Args:
        lab: the lab, whose last host is for the lighthouse.
        hosts: processors of each host, by its number.
        name: of the way.
        way: how it is started.
        folder: of journals and checkpoints.
    """

    def __init__(self, lab: NetLab, hosts: Mapping[int, str], name: str, way: Way, folder: Path) -> None:
        self._lab = lab
        self._hosts = hosts
        self._name = name
        self._way = way
        self._folder = folder
        self._lighthouse = lab.hosts - 1
        self._starters: dict[int, subprocess.Popen[str]] = {}

    def start(self, host: int) -> None:
        """Start the rank of a host, or what starts it."""
        if host in self._starters and self._way.has_lighthouse:
            self._starters[host].send_signal(signal.SIGUSR1)
            return
        again = ["--again"] if self._way.has_lighthouse else []
        module = ["-m", "benchmarks.goodput_rank", self._name, str(self._folder), *again]
        variables = {
            "NETLAB_HOST": str(host),
            "NETLAB_ADDRESS": self._lab.address(host),
            "TORCHFT_LIGHTHOUSE": f"http://{self._lab.address(self._lighthouse)}:{LIGHTHOUSE_PORT}",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            EVERY_VARIABLE: str(self._way.every),
        }
        command = ["env", *(f"{name}={value}" for name, value in variables.items()), *self._way.start(self._lab, host)]
        log = (self._folder / f"log{host}").open("a")
        self._starters[host] = self._lab.popen(host, [*command, *module], stdout=log, stderr=log)
        log.close()

    def start_all(self) -> None:
        """Start all ranks, and wait until their merges are under way."""
        if self._way.join_s is not None:
            join_ms = str(round(self._way.join_s * 1000))
            bounds = ["--min_replicas", "1", "--join_timeout_ms", join_ms, "--heartbeat_timeout_ms", "2000"]
            program = str(Path(sys.executable).with_name("torchft_lighthouse"))
            with (self._folder / "lighthouse").open("w") as log:
                bind = ["--bind", f"[::]:{LIGHTHOUSE_PORT}"]
                self._lab.popen(self._lighthouse, [program, *bounds, *bind], stdout=log, stderr=log)
        for host in self._hosts:
            self.start(host)
        # Imports would take a slow host minutes.
        self._limit(dict.fromkeys(self._hosts, "none"))
        self._wait(lambda: len(list(self._folder.glob("pid*"))) == len(self._hosts), "started")
        self._limit(self._hosts)
        self._wait(lambda: all(are_under_way(lines, len(self._hosts)) for lines in self.lines()), "merged")

    def _limit(self, cpus: Mapping[int, str]) -> None:
        for host, share in cpus.items():
            self._lab.slow_down(host, share)

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not is_done():
            if time.monotonic() > deadline:
                shutil.copytree(self._folder, Path(tempfile.gettempdir()) / "goodput", dirs_exist_ok=True)
                raise NetLabError(
                    f"{self._name}: not every rank has {what} within {START_S:.0f} s; read the logs of the ranks in "
                    f"{tempfile.gettempdir()}/goodput"
                )
            time.sleep(0.2)

    def kill(self, host: int) -> None:
        """Kill the rank of a host."""
        with suppress(ProcessLookupError, FileNotFoundError):  # it has not started again yet
            pid = int((self._folder / f"pid{host}").read_text())
            if not self._way.has_lighthouse:  # torchrun starts it again at once, and it waits until then
                (self._folder / f"down{host}").write_text(str(time.monotonic() + DOWN_S))
            os.kill(pid, signal.SIGKILL)

    def revive(self, host: int) -> None:
        """Start the rank of a host again, unless torchrun does so."""
        if self._way.has_lighthouse or self._starters[host].poll() is not None:
            self.start(host)

    def lines(self) -> list[list[Line]]:
        """The journal of each host."""
        journals = []
        for host in self._hosts:
            file = self._folder / f"rank{host}.jsonl"
            text = file.read_text() if file.exists() else ""
            # The last line may be half, after a kill as well.
            journals.append(
                [json.loads(line) for line in text.splitlines() if line.startswith("{") and line[-1] == "}"]
            )
        return journals


def schedule(seed: int, seconds: float, hosts: int) -> list[tuple[float, int]]:
    """The second and the host of each kill.

    Merges begin anew after a kill, so kills at equal distances would always come at the same time of a round.
    """
    draw = random.Random(seed)  # noqa: S311
    count = int((seconds - ROUND_S) // EVERY_S)
    killed = [draw.randrange(hosts) for _ in range(count)]
    return [(EVERY_S * number + draw.uniform(-0.5, 0.5) * ROUND_S, host) for number, host in enumerate(killed, start=1)]


class Measured(NamedTuple):
    """What one run has brought.

    Attributes:
        begun: when it began, on the machine's monotonic clock.
        journals: of each host.
        alone: samples per second of a twin of each host.
    """

    begun: float
    journals: list[list[Line]]
    alone: list[float]


def measure(name: str, way: Way, kills: Sequence[tuple[float, int]], seconds: float) -> Measured:
    """Run one way for some seconds after its start, beside the twins."""
    count = len(RATES)
    hosts = list(zip(CPUS, CORES, strict=True))
    # Hosts of one kind share a twin. It has their core, because cores differ in speed by what else they do.
    kinds = list(dict.fromkeys(hosts))
    shares = [share for share, _ in kinds]
    rates = [*RATES, *["none"] * len(kinds), "none"]
    cores = [*CORES, *(core for _, core in kinds), 0]
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as folder_of_twins,
        NetLab(len(rates), rates, cpus=[*CPUS, *shares, "none"], on_cores=cores) as lab,
    ):
        twins = Run(lab, dict(enumerate(shares, count)), "alone", _ALONE, Path(folder_of_twins))
        twins.start_all()
        run = Run(lab, dict(enumerate(CPUS)), name, way, Path(folder))
        run.start_all()
        # At a moment that has nothing to do with merges. Right after one, what the next one brings would count less.
        time.sleep(random.uniform(0.0, 2 * ROUND_S))  # noqa: S311
        begun = time.monotonic()
        events = [(second, run.kill, host) for second, host in kills]
        events += [(second + DOWN_S, run.revive, host) for second, host in kills]
        for second, do, host in sorted(events, key=lambda event: event[0]):
            time.sleep(max(0.0, begun + second - time.monotonic()))
            do(host)
        # Until a merge after the end, see `samples_per_second`.
        time.sleep(max(0.0, begun + seconds + 2 * ROUND_S - time.monotonic()))
        lab.stop()
        alone = [samples_per_second([journal], begun, seconds) for journal in twins.lines()]
        return Measured(begun, run.lines(), [alone[kinds.index(host)] for host in hosts])


def are_under_way(journal: Sequence[Line], hosts: int) -> bool:
    """Returns whether the next merge of a rank brings what it learns in one round.

    A member that joins sends nothing in its first merge with all others, and in the second what it has learnt since it
    began to train, which may be that of several rounds.
    """
    if any("entered" in line for line in journal):
        return sum(line["members"] == hosts for line in journal) >= 2
    return bool(journal)


def samples_per_second(journals: Sequence[Sequence[Line]], begun: float, seconds: float) -> float:
    """Samples that entered the model in a time; of merges that were made again, the last counts.

    What enters with the merges around the beginning and the end was learnt evenly since the merges before them.
    """
    # Each member knows those of all.
    totals = [(line["time"], line["entered"]) for lines in journals for line in lines if "entered" in line]
    if not totals:
        last = {(host, line["merge"]): line for host, lines in enumerate(journals) for line in lines}
        merges = sorted((line["time"], line["samples"]) for line in last.values())
        sums = accumulate(samples for _, samples in merges)
        totals = [(moment, total) for (moment, _), total in zip(merges, sums, strict=True)]
    known: dict[float, float] = {}
    for moment, total in sorted(totals):
        known.setdefault(total, moment)  # by the first member that knows it
    entered = sorted(known)
    moments = [known[total] for total in entered]
    before, after = np.interp([begun, begun + seconds], moments, entered)
    return float(after - before) / seconds


def bound(kills: Sequence[tuple[float, int]], rates: Sequence[float], seconds: float) -> float:
    """The goodput of members who lose nothing that they need not lose.

    A host gives nothing while it is away. What a rank has learnt since its last merge is lost with it: half a round in
    the mean.
    """
    lost = sum(rates[host] * (min(DOWN_S, seconds - second) + ROUND_S / 2) for second, host in kills)
    return 1 - lost / (sum(rates) * seconds)


def last_loss(journals: Sequence[Sequence[Line]]) -> float:
    """The latest loss that any member wrote down."""
    losses = [(line["time"], line["loss"]) for lines in journals for line in lines if "loss" in line]
    return float(max(losses)[1])


def are_equal(journals: Sequence[Sequence[Line]]) -> bool:
    """Whether members have the same weights after the last merge that several of them wrote down."""
    digests: dict[int, dict[int, str]] = {}
    for host, lines in enumerate(journals):
        for line in lines:
            digests.setdefault(line["merge"], {})[host] = line["digest"]
    shared = [number for number, members in digests.items() if len(members) > 1]
    return bool(shared) and len(set(digests[max(shared)].values())) == 1


def longest_return(journals: Sequence[Sequence[Line]], begun: float, kills: Sequence[tuple[float, int]]) -> float:
    """The most seconds from when a killed rank may start again to its first merge; NaN if one has not come back."""
    seconds = []
    for second, host in kills:
        may_start = begun + second + DOWN_S
        # A member that has joined, and has merged with nobody yet, is one of one.
        merged = [line["time"] for line in journals[host] if line["time"] > may_start and line.get("members") != 1]
        seconds.append(min(merged, default=math.nan))
        seconds[-1] -= may_start
    return max(seconds, default=0.0) if all(value == value for value in seconds) else math.nan


def curve(begun: float, journals: Sequence[Sequence[Line]]) -> Curve:
    """Returns the losses of a run against seconds since it began: of each merge, the first one that a member noted."""
    noted = sorted(
        (line["time"] - begun, line["merge"], line["loss"])
        for lines in journals
        for line in lines
        if "loss" in line and line["time"] >= begun
    )
    first = {merge: (second, loss) for second, merge, loss in reversed(noted)}
    points = sorted(first.values())
    return {
        "seconds": [round(second, 2) for second, _ in points],
        "losses": [round(loss, 4) for _, loss in points],
    }


def draw(curves: Mapping[str, Mapping[str, Curve]], file: Path) -> None:
    """Draw loss against seconds: a color for each way, and a line for each schedule of kills."""
    with drawn(file, figsize=(6, 3.6), layout="tight") as figure:
        axis = figure.subplots()
        for number, (name, of_seeds) in enumerate(curves.items()):
            label = name.replace("_", " ")
            label += f", {len(of_seeds)} schedules" if len(of_seeds) > 1 else ""
            for place, one in enumerate(of_seeds.values()):
                look: dict[str, Any] = {"color": f"C{number}", "alpha": 0.6 if len(of_seeds) > 1 else 1.0}
                axis.plot(one["seconds"], one["losses"], label=None if place else label, **look)
        axis.set_xlabel("time (s)")
        axis.set_ylabel("validation loss (nats per byte)")
        axis.legend()


def _notes(seconds: float) -> list[str]:
    return [
        f"{seconds:.0f} s of each way. Four hosts with {', '.join(RATES)} and {', '.join(CPUS)} of a processor; a "
        f"random host's rank is killed every {EVERY_S:.0f} s, give or take {ROUND_S / 2:g} s, and may start again "
        f"{DOWN_S:.0f} s later. A character "
        "model. Goodput: samples per second that entered the merged model, over those of hosts alike that each train "
        "alone at the same time. bound: what is left if nothing is lost but the time in which a host is away, and half "
        f"a round of {ROUND_S:g} s, which a killed rank has learnt since its last merge. Each host runs on one core, "
        "and a host that trains alone has as much of the same core. The lighthouse has a host of its own.",
        "alone: samples per second of the hosts that train alone. "
        "loss: of the last merge, on validation text; ways that see fewer samples end higher. back: seconds from when "
        "a killed rank may start again to its first merge; a dash: it had made none by the end. equal: whether members "
        "that took part in the last merge have the same weights. Time begins once every rank has merged, members by "
        "the clock twice with all others: where that takes many steps, ranks have learnt more by then.",
        f"torchft's DiLoCo: averages every {', '.join(map(str, TRIALS[:-1]))} and {TRIALS[-1]} steps were tried for "
        f"{TRIAL_S:.0f} s each with the first schedule, and the best number was taken. Members that wait for a slow "
        "one go on without it after 2 s. ddp and lock_step make no step after the first kill where imports take longer "
        "than the time between two.",
    ]


def add(report: Report, label: str, name: str, way: Way, seed: int, seconds: float) -> Measured:
    """Run a way."""
    kills = schedule(seed, seconds, len(RATES))
    measured = measure(name, way, kills, seconds)
    begun, journals, alone = measured
    most = sum(alone)
    best = bound(kills, alone, seconds)
    rate = samples_per_second(journals, begun, seconds)
    loss = last_loss(journals)
    back = longest_return(journals, begun, kills)
    equal = "yes" if are_equal(journals) else "no"
    returned = None if math.isnan(back) else back
    report.rows.append([label, seed, rate / most, best, rate, most, loss, returned, equal])
    print(
        f"{label}, seed {seed}: goodput {rate / most:.2f}, bound {best:.2f}, "
        f"{rate:.0f} of {most:.0f} samples/s, loss {loss:.3f}, back {back:.1f} s, equal: {equal}",
        flush=True,
    )
    return measured


def tuned(report: Report, name: str, way: Way, seed: int) -> Way:
    """Returns a way with the best of some numbers of steps between two averages."""
    found: dict[int, float] = {}
    for every in TRIALS:
        add(report, f"{name}, trial of {every}", name, way._replace(every=every), seed, TRIAL_S)
        found[every] = float(report.rows[-1][2] or 0.0)
    return way._replace(every=max(found, key=lambda every: found[every]))


def _measure(options: argparse.Namespace) -> Report:
    """Run all ways."""
    numbers = {"goodput": ".2f", "bound": ".2f", "samples/s": ".0f", "alone": ".0f", "loss": ".2f", "back (s)": ".1f"}
    columns = {"way": "", "seed": ".0f", **numbers, "equal": ""}
    curves: dict[str, dict[str, Curve]] = {}
    title = "Goodput while ranks die, are slow, and have slow links"
    report = Report("goodput", title, columns, _notes(options.seconds))
    report.raw["curves"] = curves
    report.draw = lambda file: draw(curves, file)
    for name, way in WAYS.items():
        if way.is_tuned:
            way = tuned(report, name, way, SEEDS[0])
            report.notes = [*report.notes, f"{name}: {way.every} steps between two averages."]
        for seed in SEEDS if name == "elastic" else SEEDS[:1]:
            measured = add(report, name, name, way, seed, options.seconds)
            curves.setdefault(name, {})[str(seed)] = curve(measured.begun, measured.journals)
    return report


def _long_enough(text: str) -> float:
    """Returns seconds in which members merge."""
    with suppress(ValueError):
        if 2 * ROUND_S <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a number of at least {2 * ROUND_S:g} seconds, which are two rounds"
    )


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=_long_enough, default=600.0, help="of each way (600)")
    present(parser, _measure)


if __name__ == "__main__":
    main()
