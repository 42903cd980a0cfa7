"""Weights & Biases: starting a run, online where a key is configured, and offline otherwise."""

from __future__ import annotations

import netrc
import os
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from recipes.errors import RecipeError

#: Seconds that W&B has for a first answer, and for the upload of what is left when a run ends.
INIT_TIMEOUT_S, FINISH_TIMEOUT_S = 30, 300


def start_wandb(folder: str, silent: bool = False, **arguments: Any) -> Any:
    """A new W&B run in the mode of `wandb_mode`; an offline run if the server cannot be reached.

    Args:
        folder: an existing folder; the run writes below its folder ``wandb``.
        silent: whether the console stays empty; only an unreachable server is reported then.
        **arguments: arguments of ``wandb.init``.

    Raises:
        RecipeError: W&B refuses an argument.
    """
    import wandb

    mode = wandb_mode()
    if mode == "offline" and os.environ.get("WANDB_MODE") != "offline" and not silent:
        _say("no W&B key is configured: this run is logged offline; `wandb login`, then `wandb sync`, uploads it")
    # A run that cannot upload everything ends all the same: its records stay in the folder.
    settings = wandb.Settings(
        console="off", init_timeout=INIT_TIMEOUT_S, finish_timeout=FINISH_TIMEOUT_S, silent=silent
    )
    init = partial(wandb.init, dir=folder, settings=settings, **arguments)
    if mode == "online":
        try:
            return init(mode=mode)
        except wandb.errors.Error as error:
            _say(f"W&B cannot be reached ({error}); this run is logged offline")
            mode = "offline"
    try:
        return init(mode=mode)
    except wandb.errors.UsageError as error:  # not for want of a server: an offline run has none
        raise RecipeError(f"W&B refuses a setting of logger: {error}; choose another one") from error


def wandb_mode() -> Any:
    """The mode of new W&B runs: ``"online"``, ``"offline"`` or ``"disabled"``.

    Without a key, runs are offline. The environment variable WANDB_MODE may ask for offline or disabled runs.
    """
    wanted = os.environ.get("WANDB_MODE", "online")
    if wanted == "disabled":
        return "disabled"
    return "online" if wanted in ("online", "shared") and _has_key() else "offline"


def _has_key() -> bool:
    """Whether wandb will find credentials; their values are not looked at."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    server = os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url
    try:
        return bool({urlsplit(server).netloc, "api.wandb.ai"} & netrc.netrc(os.environ.get("NETRC")).hosts.keys())
    except (OSError, netrc.NetrcParseError):
        return False  # there is no readable file with keys


def _say(text: str) -> None:
    Console(stderr=True, soft_wrap=True, markup=False).print(text, style="yellow", highlight=False)
