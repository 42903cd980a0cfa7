"""Hardware profiles: what they may ask for, what this machine has, and what a result says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_gqsgd.errors import counted
from netlab.lab import parse_rate
from netlab.machine import cores
from recipes.errors import RecipeError
from recipes.launch.processes import gpus, local_processes

NETLAB, MULTI_NODE, SLURM = "netlab", "multi_node", "slurm"

#: Most processes per core of a machine without GPUs. Each process imports torch and Lightning, which takes half a
#: gigabyte of memory and ten seconds of a core: with more processes, the first step is minutes away.
MOST_PER_CORE = 8


class HardwareError(RecipeError):
    """A hardware profile that cannot be had as asked; the message names the remedy."""


def check_profile(config: Mapping[str, Any]) -> None:
    """Check those values of a profile that can be judged without a look at the machine.

    Args:
        config: the whole configuration.

    Raises:
        HardwareError, NetLabError: the profile does not take a value.
    """
    hardware, trainer = config["hardware"], config["trainer"]
    name, nodes, devices = hardware["name"], trainer["num_nodes"], trainer["devices"]
    _check_count("trainer.devices", devices)
    _check_count("trainer.num_nodes", nodes)
    if name in (NETLAB, SLURM) and not (isinstance(devices, int) and devices >= 1):
        raise HardwareError(
            f"hardware={name} has to know the number of processes per node: hardware.devices={devices!r} is none; "
            "take an integer of at least 1"
        )
    if name != NETLAB:
        return
    if not (isinstance(nodes, int) and nodes >= 2):
        raise HardwareError(f"hardware=netlab: hardware.nodes={nodes!r} must be at least 2; a single host has no link")
    if trainer["accelerator"] != "cpu":
        raise HardwareError(f"hardware=netlab runs on hardware.accelerator=cpu, not {trainer['accelerator']}")
    parse_rate(str(hardware["rate"]))


def check_devices(config: Mapping[str, Any]) -> None:
    """Check that this machine has the cores or GPUs that a configuration asks for.

    Args:
        config: the whole configuration.

    Raises:
        HardwareError: the machine has no GPU, or too few; or it has far fewer cores than processes.
    """
    name, accelerator = config["hardware"]["name"], config["trainer"]["accelerator"]
    if accelerator == "cpu":
        _check_cores(config)
    if accelerator not in ("gpu", "cuda"):
        return
    cpu = "hardware=cpu" + (", or hardware.accelerator=cpu" if name in (MULTI_NODE, SLURM) else "")
    present = gpus()
    if not present:
        raise HardwareError(
            f"hardware={name} needs a GPU (accelerator={accelerator}), and torch finds none on this machine; take {cpu}"
        )
    wanted = local_processes(accelerator, config["trainer"]["devices"])
    if wanted > present:
        raise HardwareError(
            f"hardware={name} asks for {counted(wanted, 'GPU')} per node and torch finds {present}; take "
            f"hardware.devices={present}, or {cpu}"
        )


def _check_count(key: str, value: Any) -> None:
    """Refuse a number of processes or nodes below 1; -1 stands for all devices, as in Lightning."""
    if not isinstance(value, int | str) and not len(value):
        raise HardwareError(f"{key}={value!r} names no device; take a number of at least 1, or a list such as [0,1]")
    number = int(value) if str(value).lstrip("-").isdecimal() else 1
    if number < 1 and not (number == -1 and key == "trainer.devices"):
        raise HardwareError(f"{key}={value} makes no process; take a number of at least 1")


def _check_cores(config: Mapping[str, Any]) -> None:
    """Refuse a number of processes that would keep this machine busy with imports for minutes."""
    trainer, lab = config["trainer"], config["hardware"]["name"] == NETLAB
    here = local_processes("cpu", trainer["devices"]) * (trainer["num_nodes"] if lab else 1)
    most = MOST_PER_CORE * cores()
    if here > most:
        asked = f"hardware.nodes={trainer['num_nodes']} times trainer.devices" if lab else "trainer.devices"
        raise HardwareError(
            f"{asked}={trainer['devices']} asks for {here} processes on {counted(cores(), 'core')}, which are busy "
            f"for minutes before the first step; take at most {most}, {MOST_PER_CORE} per core"
        )


def variables(env: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables that a profile sets; an entry that is None sets none."""
    return {name: str(value) for name, value in env.items() if value is not None}


def described(hardware: Mapping[str, Any]) -> str:
    """Name, link and environment variables of a profile in one line."""
    return ", ".join([f"{hardware['name']} ({hardware['link']})", *map("=".join, variables(hardware["env"]).items())])


def hardware_facts(hardware: Mapping[str, Any], nodes: int, devices: int, device: str) -> dict[str, Any]:
    """What a result file says of the hardware of a run.

    Args:
        hardware: the profile.
        nodes: number of nodes of the run.
        devices: number of processes on each node.
        device: name of the device.
    """
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
