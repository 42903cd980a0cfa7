"""Hardware profiles: what they may ask for, what this machine has, and what a result says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_gqsgd.errors import counted
from netlab.lab import parse_rate
from recipes.errors import RecipeError
from recipes.launch.processes import local_processes

NETLAB, MULTI_NODE, SLURM = "netlab", "multi_node", "slurm"


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
    """Check that this machine has the GPUs that a configuration asks for.

    Args:
        config: the whole configuration.

    Raises:
        HardwareError: the machine has no GPU, or too few.
    """
    name, accelerator = config["hardware"]["name"], config["trainer"]["accelerator"]
    if accelerator not in ("gpu", "cuda"):
        return
    cpu = "hardware=cpu" + (", or hardware.accelerator=cpu" if name in (MULTI_NODE, SLURM) else "")
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
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
