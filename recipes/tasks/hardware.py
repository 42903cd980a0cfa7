"""The hardware profile of a run: whether it can be had here, what it sets, what a result says of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

from netlab.lab import parse_rate
from recipes.tasks.errors import RecipeError
from recipes.tasks.launch import local_processes

NETLAB, MULTI_NODE, SLURM = "netlab", "multi_node", "slurm"


class HardwareError(RecipeError):
    """A profile that cannot be had as asked; the message names the remedy."""


def check_profile(config: Mapping[str, Any]) -> None:
    """What needs no look at the machine.

    Raises:
        HardwareError, NetLabError: a value that the profile does not take.
    """
    hardware, trainer = config["hardware"], config["trainer"]
    name, nodes, devices = hardware["name"], trainer["num_nodes"], trainer["devices"]
    if name in (NETLAB, SLURM) and not (isinstance(devices, int) and devices >= 1):
        raise HardwareError(f"hardware={name} has to know the processes per node: hardware.devices={devices!r} is none")
    if name != NETLAB:
        return
    if not (isinstance(nodes, int) and nodes >= 2):
        raise HardwareError(f"hardware=netlab: hardware.nodes={nodes!r} must be at least 2; one host has no link")
    if trainer["accelerator"] != "cpu":
        raise HardwareError(f"hardware=netlab runs on hardware.accelerator=cpu, not {trainer['accelerator']}")
    parse_rate(str(hardware["rate"]))


def check_devices(config: Mapping[str, Any]) -> None:
    """Whether this machine has the GPUs that are asked for.

    Raises:
        HardwareError: it has none, or too few.
    """
    name, accelerator = config["hardware"]["name"], config["trainer"]["accelerator"]
    if accelerator not in ("gpu", "cuda"):
        return
    cpu = "hardware=cpu" + (", or hardware.accelerator=cpu" if name in (MULTI_NODE, SLURM) else "")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        raise HardwareError(
            f"hardware={name} needs a GPU (accelerator={accelerator}), and torch finds none on this machine; take {cpu}"
        )
    wanted = local_processes(accelerator, config["trainer"]["devices"])
    if wanted > found:
        raise HardwareError(
            f"hardware={name} asks for {wanted} GPUs per node and torch finds {found}; take hardware.devices={found}, "
            f"or {cpu}"
        )


@contextmanager
def profile_environment(wanted: Mapping[str, Any], environment: MutableMapping[str, str]) -> Iterator[None]:
    """The profile's environment variables, inside ``with``; processes that are started there inherit them.

    Entries that are None are left as they are.

    Raises:
        HardwareError: a variable has another value already; nothing is changed then.
    """
    values = _values(wanted)
    for name, value in values.items():
        if environment.get(name, value) != value:
            raise HardwareError(
                f"{name}={environment[name]} is set in the environment, the hardware profile sets {name}={value}; "
                f"unset {name}, or take hardware.env.{name}={environment[name]} (null: whatever the environment has)"
            )
    added = [name for name in values if name not in environment]
    environment.update(values)
    try:
        yield
    finally:
        for name in added:
            environment.pop(name, None)


def described(hardware: Mapping[str, Any]) -> str:
    """Name, link and environment variables in a line."""
    return ", ".join([f"{hardware['name']} ({hardware['link']})", *map("=".join, _values(hardware["env"]).items())])


def hardware_facts(hardware: Mapping[str, Any], nodes: int, devices: int, device: str) -> dict[str, Any]:
    """The entry of a result file.

    Args:
        hardware: the profile.
        nodes, devices: what the run had: nodes, and processes on each.
        device: its name.
    """
    rate = {"rate": hardware["rate"]} if "rate" in hardware else {}
    return {
        "profile": hardware["name"],
        **rate,
        "nodes": nodes,
        "devices": devices,
        "device": device,
        "link": hardware["link"],
        "env": _values(hardware["env"]),
    }


def _values(env: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in env.items() if value is not None}
