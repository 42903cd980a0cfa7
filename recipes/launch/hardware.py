"""Hardware profiles: what they may ask for, what this machine has, and what a result says of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_gqsgd.errors import counted
from lightning_gqsgd.wire.processors import processors
from netlab.lab import parse_rate
from recipes.errors import RecipeError, typed
from recipes.launch.processes import external_rank, gpus, local_processes

CPU, NETLAB, MULTI_NODE, SLURM = "cpu", "netlab", "multi_node", "slurm"

#: Most processes per core of a machine without GPUs. Each process imports torch and Lightning, which takes half a
#: gigabyte of memory and ten seconds of a core: with more processes, the first step is minutes away.
MOST_PER_CORE = 8


def check_profile(config: Mapping[str, Any]) -> None:
    """Check those values of a profile that can be judged without a look at the machine."""
    hardware, trainer = config["hardware"], config["trainer"]
    name, nodes, devices = hardware["name"], trainer["num_nodes"], trainer["devices"]
    _check_processes(_asked_by(config, "devices"), devices, trainer["accelerator"])
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        key = _asked_by(config, "num_nodes")
        raise RecipeError(f"{key}={typed(nodes)} makes no process; take a number of at least 1")
    if name in (NETLAB, SLURM) and not (isinstance(devices, int) and devices >= 1):
        raise RecipeError(
            f"hardware={name} has to know the number of processes per node: hardware.devices={devices!r} is none; "
            "take an integer of at least 1"
        )
    if name != NETLAB:
        return
    if nodes < 2:
        raise RecipeError(f"hardware=netlab: hardware.nodes={nodes!r} must be at least 2; a single host has no link")
    if trainer["accelerator"] != "cpu":
        raise RecipeError(f"hardware=netlab runs on hardware.accelerator=cpu, not {trainer['accelerator']}")
    parse_rate(str(hardware["rate"]))


def check_devices(config: Mapping[str, Any]) -> None:
    """Check that this machine has the cores or GPUs that a configuration asks for.

    Raises:
        RecipeError: the machine has no GPU, or too few; or it has far fewer cores than processes.
    """
    accelerator = config["trainer"]["accelerator"]
    if accelerator == "cpu":
        _check_cores(config)
    if accelerator not in ("gpu", "cuda"):
        return
    asked, cpu = _gpus_asked_by(config)
    present = gpus()
    if not present:
        raise RecipeError(f"{asked} needs a GPU, and torch finds none on this machine; take {cpu}")
    wanted = local_processes(accelerator, config["trainer"]["devices"])
    if wanted > present:
        raise RecipeError(
            f"{asked} asks for {counted(wanted, 'GPU')} per node and torch finds {present}; take "
            f"{_asked_by(config, 'devices')}={present}, or {cpu}"
        )


#: Settings of the trainer that follow the profile, with the profile's names for them.
_OF_PROFILE = {"accelerator": "accelerator", "devices": "devices", "num_nodes": "nodes"}


def _asked_by(config: Mapping[str, Any], setting: str) -> str:
    """The key that a setting of the trainer comes from: the trainer's own, or the profile's where both agree."""
    own, profile = config["trainer"][setting], config["hardware"][_OF_PROFILE[setting]]
    return f"hardware.{_OF_PROFILE[setting]}" if own == profile else f"trainer.{setting}"


def _gpus_asked_by(config: Mapping[str, Any]) -> tuple[str, str]:
    """The override that asks for GPUs, and the one that does without them."""
    name, key = config["hardware"]["name"], _asked_by(config, "accelerator")
    if key.startswith("trainer") or name == CPU:  # an override over a profile that may have none
        return f"{key}={config['trainer']['accelerator']}", f"{key}=cpu"
    return f"hardware={name}", "hardware=cpu" + (", or hardware.accelerator=cpu" if name in (MULTI_NODE, SLURM) else "")


def _check_processes(key: str, value: Any, accelerator: str) -> None:
    """Refuse a value of ``trainer.devices`` that Lightning does not take for an accelerator."""
    shown, lists = typed(value), isinstance(value, Sequence) and not isinstance(value, str)
    if lists and not value:
        raise RecipeError(f"{key}={shown} names no device; take a number of at least 1, or a list such as [0,1]")
    number = int(value) if re.fullmatch(r"-?\d+", str(value)) else None
    names_gpus = number == -1 or lists and all(type(gpu) is int and gpu >= 0 for gpu in value)
    if names_gpus and accelerator == "cpu":
        raise RecipeError(
            f"{key}={shown} names GPUs, and this run has accelerator=cpu; take a number of at least 1, e.g. {key}=2"
        )
    if number is not None and number < 1 and not names_gpus:
        raise RecipeError(f"{key}={shown} makes no process; take a number of at least 1")
    if number is None and not names_gpus and value != "auto":
        raise RecipeError(
            f"{key}={shown} is not a number of processes; take an integer of at least 1, auto, or a list of GPUs such "
            "as [0,1]"
        )


def _check_cores(config: Mapping[str, Any]) -> None:
    """Refuse a number of processes that would keep this machine busy with imports for minutes.

    A launcher outside has started its processes already, and may have bound this one to a core of its own.
    """
    if external_rank(os.environ) is not None:
        return
    trainer, lab = config["trainer"], config["hardware"]["name"] == NETLAB
    here = local_processes("cpu", trainer["devices"]) * (trainer["num_nodes"] if lab else 1)
    most = MOST_PER_CORE * processors()
    if here > most:
        asked = f"hardware.nodes={trainer['num_nodes']} times trainer.devices" if lab else "trainer.devices"
        raise RecipeError(
            f"{asked}={trainer['devices']} asks for {here} processes on {counted(processors(), 'core')}, which are "
            f"busy for minutes before the first step; take at most {most}, {MOST_PER_CORE} per core"
        )


def variables(env: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables that a profile sets; an entry that is None sets none."""
    return {name: str(value) for name, value in env.items() if value is not None}


def described(hardware: Mapping[str, Any]) -> str:
    """Name, link and environment variables of a profile in one line."""
    return ", ".join([f"{hardware['name']} ({hardware['link']})", *map("=".join, variables(hardware["env"]).items())])


def hardware_facts(hardware: Mapping[str, Any], nodes: int, devices: int, device: str) -> dict[str, Any]:
    """What a result file says of the hardware of a run."""
    rate = {"rate": hardware["rate"]} if "rate" in hardware else {}
    return {
        "profile": hardware["name"],
        **rate,
        "nodes": nodes,
        "devices": devices,
        "device": device,
        "link": hardware["link"],
        "env": variables(hardware["env"]),
    }
