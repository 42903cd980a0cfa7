"""Steps of a comparison as the performance model of `gqsgd advise` predicts them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_gqsgd.presets import PRESETS
from recipes.comparison.results import Run
from recipes.errors import RecipeError
from recipes.launch.hardware import NETLAB
from recipes.strategies.choices import preset_node

if TYPE_CHECKING:
    from lightning_gqsgd.predict.model import Prediction

#: Candidates of the model by the strategies that they are: plain DDP, torch's bf16 hook, and the package's own codec.
CANDIDATES = {
    "ddp": "fp32",
    "ddp_bf16": "bf16",
    "gqsgd": "8 bit",
    "gqsgd_4bit": "4 bit",
    "gqsgd_3bit": "3 bit",
    "gqsgd_2bit": "2 bit",
    "gqsgd_trellis": "2 bit, trellis",
}
#: Rate of a link that is not shaped.
_UNLIMITED = "none"


def computation(runs: Sequence[Run]) -> float:
    """Seconds of a step that waits for nothing: the median step, less the communication that backward did not hide; the
    mean over runs.
    """
    each = [run.facts["step_s"]["median"] - run.facts["exposed_s"].get("median", 0.0) for run in runs]
    return max(statistics.fmean(each), 1e-6)


def known(configs: Sequence[Mapping[str, Any]], variants: Sequence[str]) -> list[str]:
    """The variants that the model knows. A preset with other settings than its own, e.g. other bits, is not known."""
    changed = {str(config["strategy"]["name"]) for config in configs if not _is_unchanged(config["strategy"])}
    return [variant for variant in variants if variant in CANDIDATES and variant not in changed]


def _is_unchanged(strategy: Mapping[str, Any]) -> bool:
    sent_by = {key: value for key, value in strategy.items() if key != "timeout"}
    return strategy["name"] not in PRESETS or sent_by == preset_node(strategy["name"])


def predicted_steps(
    config: Mapping[str, Any], compute_s: float, hosts: int, rate: str, variants: Sequence[str]
) -> dict[str, Prediction]:
    """A step of each variant that the model knows, on hosts with one process each.

    The codec's costs are the model's estimate for processors, and not a measurement. Nothing is predicted for a network
    whose tables have sparse gradients, nor for one that cannot be built here, as one of the user's own.

    Args:
        config: configuration of a run of the comparison: its network is what counts.
        compute_s: seconds of a step that waits for nothing.
        hosts: number of hosts.
        rate: of each host's link, e.g. ``"100mbit"``.
        variants: names of strategies, see `known`.
    """
    if config["model"].get("sparse"):
        return {}  # the model times dense gradients
    # Here, not above: torch takes seconds to import, and a comparison that predicts nothing needs none.
    import torch
    from omegaconf import OmegaConf

    from lightning_gqsgd.predict.advice import Cluster, candidates, over_links
    from lightning_gqsgd.predict.costs import ESTIMATES, LATENCY_S, Link
    from lightning_gqsgd.predict.timeline import estimated
    from lightning_gqsgd.spec.quantities import bytes_per_second
    from recipes.training.building import build_network

    try:
        with torch.device("meta"):
            network = build_network(OmegaConf.create(dict(config["model"])))
    except RecipeError:
        return {}  # the trainings are over, and their report needs no prediction
    # A backward pass has twice the operations of a forward pass.
    timeline = estimated(network, compute_s * 2 / 3)
    link = Link(bytes_per_second(rate, "link"), LATENCY_S)
    costs_at = over_links(ESTIMATES["cpu"], 1, link, link)
    choices = candidates(Cluster(timeline, costs_at, hosts, 1, config["data"]["batch_size"], link.bytes_per_s))
    made = {candidate.name: candidate.prediction for candidate in choices}
    return {variant: made[CANDIDATES[variant]] for variant in variants}


def beside_measured(
    configs: Sequence[Mapping[str, Any]], link: str | None, variants: Mapping[str, Sequence[Run]]
) -> dict[str, Prediction]:
    """Predictions for the steps that were measured on shaped links; empty where the model has no ground to stand on.

    It needs the rate of the links, the computation of plain DDP's step, one process on each host, and what
    `predicted_steps` needs.

    Args:
        configs: configurations of all trainings.
        link: the rate at which steps were measured; None: that of the configurations.
        variants: the finished runs of each variant.
    """
    config = configs[0]
    hardware = [each["hardware"] for each in configs]
    rate = link or hardware[0].get("rate", _UNLIMITED)
    same = all(each["name"] == NETLAB and each["devices"] == 1 for each in hardware)
    alike = len({(each.get("rate"), each.get("nodes")) for each in hardware}) == 1
    models = len({repr(each["model"]) for each in configs}) == 1
    if not (same and alike and models) or rate == _UNLIMITED or "ddp" not in variants:
        return {}
    compute_s = computation(variants["ddp"])
    return predicted_steps(config, compute_s, hardware[0]["nodes"], rate, known(configs, list(variants)))
