"""The model of the step time: cases that are known by hand, and what has to hold whatever the numbers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.paper import tree_seconds
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.kernels.meta import Work
from lightning_gqsgd.predict import (
    Bucket,
    Collective,
    Costs,
    Gamma,
    Link,
    Timeline,
    collectives_between,
    estimated,
    predict,
)
from lightning_gqsgd.predict.costs import BF16_HOOK, ESTIMATES, KINDS, at_ranks, on_faster_link
from lightning_gqsgd.predict.probe import measure
from lightning_gqsgd.predict.profile import bucket_profiles
from lightning_gqsgd.presets import FIXED, make_config
from lightning_gqsgd.reducers.memory import StabilityWarning
from lightning_gqsgd.wire.plan import Plan
from tests.processes import ended_well

RANKS = 4
BETA = 1e-9
GAMMA = Gamma(2e-9, 1e-9, 0.5e-9)


def _costs(**fields: Any) -> Costs:
    """Links of 1 GB/s without latency, and processors enough for everything."""
    kinds = {f"{scope} {kind}": Collective(0.0, BETA) for scope in ("all", "node", "peers") for kind in KINDS}
    values: dict[str, Any] = {
        "collectives": kinds,
        "gammas": {f"{family}/{bits}": GAMMA for family in ("linear", "companded") for bits in (8, 4)},
        "cores": 8.0,
    }
    return Costs(**{**values, **fields})


def _timeline(*numels: int, backward_s: float = 0.1) -> Timeline:
    """Buckets of one parameter each, ready at equal distances."""
    count = len(numels)
    buckets = [Bucket((Segment(n, numel, False),), backward_s * (n + 1) / count) for n, numel in enumerate(numels)]
    return Timeline(tuple(buckets), backward_s, 0.05, 0.01)


FIELDS: dict[str, dict[str, Any]] = {
    "two_shot": {"reducer": "two_shot"},
    "gather": {"reducer": "gather"},
    "sum": {"reducer": "sum"},
    "native": {"reducer": "native"},
    "hierarchical": {"reducer": "hierarchical", "node_size": 2},
}


def test_one_rank_computes_and_sends_nothing() -> None:
    made = predict(_timeline(1000), _costs(), 1, GQSGDConfig())
    assert (made.step_s, made.sent_bytes, made.exposed_s) == (pytest.approx(0.16), 0, pytest.approx(0))
    assert made.efficiency == pytest.approx(1)


def test_plain_ddp_on_one_bucket_takes_computation_and_bytes_over_rate() -> None:
    """One bucket that is ready at the end, and no latency: nothing overlaps."""
    made = predict(_timeline(1_000_000), _costs(), RANKS, "native")
    sent = 2 * 3 / 4 * 4_000_000
    assert made.sent_bytes == sent
    assert made.step_s == pytest.approx(0.16 + sent * BETA)
    assert made.exposed_s == pytest.approx(sent * BETA)


def test_a_mean_of_several_messages_costs_one_decoding_and_what_each_further_one_adds() -> None:
    seconds = [_costs().seconds(Work("decode", "linear/8", numel=1000, sources=count)) for count in (1, 2, 4)]
    assert seconds == pytest.approx([1e-6, 1.5e-6, 2.5e-6])


def test_torchs_bf16_hook_is_as_long_as_it_was_measured_or_else_as_long_as_copies() -> None:
    timeline = _timeline(1_000_000)
    copying, measured = _costs(touch_s=1e-9), _costs(touch_s=1e-9, gammas={BF16_HOOK: Gamma(3e-9, 2e-9, 0.0)})
    assert predict(timeline, copying, RANKS, "bf16").codec_s == pytest.approx(16e-3)
    assert predict(timeline, measured, RANKS, "bf16").codec_s == pytest.approx(5e-3)


def test_a_stage_of_a_piece_takes_the_sequencing_thread_its_time() -> None:
    config = GQSGDConfig(reducer="gather", sample_every=0)
    without, with_stages = (predict(_timeline(1000), _costs(stage_s=cost), RANKS, config) for cost in (0.0, 1e-3))
    # The piece and the comparison of stamps have two stages each: one ends with a collective, one with the result.
    assert with_stages.codec_s - without.codec_s == pytest.approx(4e-3)


def test_torchs_bf16_hook_sends_half() -> None:
    made = predict(_timeline(1_000_000), _costs(), RANKS, "bf16")
    assert made.sent_bytes == 2 * 3 / 4 * 2_000_000
    assert made.step_s == pytest.approx(0.16 + made.sent_bytes * BETA)


def test_one_piece_of_two_shots_takes_its_parts_one_after_the_other() -> None:
    numel = 1 << 19  # one piece
    made = predict(_timeline(numel), _costs(), RANKS, GQSGDConfig(bits=8, reducer="two_shot", sample_every=0))
    encode = numel * (RANKS - 1) / RANKS * GAMMA.encode_s  # not what a rank would send itself
    reduce = numel / RANKS * (RANKS * GAMMA.reduce_s + GAMMA.encode_s)
    decode = numel * GAMMA.decode_s
    assert made.exposed_s == pytest.approx(encode + reduce + decode + made.sent_bytes * BETA, rel=1e-3)
    assert made.codec_s == pytest.approx(encode + reduce + decode, rel=1e-3)


def test_latency_counts_once_for_each_collective_in_a_row() -> None:
    config = GQSGDConfig(bits=8, reducer="two_shot", sample_every=0)
    late = {key: replace(cost, alpha_s=0.5) for key, cost in _costs().collectives.items()}
    fast, slow = (predict(_timeline(1 << 19), costs, RANKS, config) for costs in (_costs(), _costs(collectives=late)))
    assert slow.step_s - fast.step_s == pytest.approx(2 * 0.5, rel=1e-3)


def test_a_collective_that_sends_and_receives_in_turns_takes_longer_and_leaves_the_link_free() -> None:
    turns = {key: replace(cost, alone_s=BETA) for key, cost in _costs().collectives.items()}
    made = predict(_timeline(1_000_000), _costs(collectives=turns), RANKS, "native")
    assert made.exposed_s == pytest.approx(2 * made.sent_bytes * BETA)
    assert made.wire_s == pytest.approx(made.sent_bytes * BETA)


def test_early_buckets_hide_behind_the_backward_pass() -> None:
    whole, halves = (
        predict(_timeline(*numels), _costs(), RANKS, "native") for numels in ((2_000_000,), (1_000_000, 1_000_000))
    )
    assert halves.exposed_s == pytest.approx(whole.exposed_s / 2)
    assert halves.sent_bytes == whole.sent_bytes


def test_codec_and_backward_pass_share_a_processor() -> None:
    """Two buckets, of which the first one's codec runs beside the rest of the backward pass."""
    config, slow = GQSGDConfig(bits=8, reducer="two_shot", sample_every=0), Gamma(20e-9, 10e-9, 5e-9)
    gammas = {"companded/8": slow}
    plenty, single = (
        predict(_timeline(1 << 20, 1 << 10), _costs(gammas=gammas, cores=cores), RANKS, config) for cores in (8.0, 1.0)
    )
    assert single.step_s > plenty.step_s + 0.01
    assert single.step_s <= plenty.compute_s + single.codec_s + single.wire_s


def test_threads_that_other_programs_slow_down_take_longer_and_together_get_more() -> None:
    """Half a processor for one thread, and a whole one for two: a codec beside the backward pass slows nobody down."""
    config, numel = GQSGDConfig(bits=8, reducer="two_shot", sample_every=0), 1 << 19
    quiet, busy = (
        predict(_timeline(numel, 1 << 10), _costs(**fields), RANKS, config)
        for fields in ({"cores": 8.0}, {"cores": 1.0, "thread": 0.5})
    )
    assert busy.codec_s == pytest.approx(2 * quiet.codec_s, rel=1e-3)
    backward = [event.end_s for event in busy.events if event.label == "backward"]
    assert max(backward) == pytest.approx(0.15)


@pytest.mark.parametrize("on_streams", [False, True])
@pytest.mark.parametrize("name", FIELDS)
def test_events_of_one_resource_never_overlap(name: str, on_streams: bool) -> None:
    config = GQSGDConfig(bits=8 if name != "sum" else 4, sample_every=0, **FIELDS[name])
    costs = _costs(cores=1.0, on_streams=on_streams, launch_s=1e-5, touch_s=1e-10)
    made = predict(_timeline(1 << 20, 1 << 21, 3000), costs, RANKS, config)
    for resource in {event.resource for event in made.events}:
        mine = sorted(event[4:] for event in made.events if event.resource == resource)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in zip(mine, mine[1:], strict=False)), resource
    assert made.step_s == pytest.approx(max(event.end_s for event in made.events))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", [name for name in FIELDS if name != "hierarchical"])
def test_bytes_are_those_of_the_plan(name: str, ranks: int) -> None:
    config = resolve(GQSGDConfig(bits=8, sample_every=0, **FIELDS[name]), ranks)
    segments = (Segment(0, 1_234_567, False), Segment(1, 100, True), Segment(2, 5000, False))
    plan = Plan(segments, setting_of(config, ranks, torch.float32))
    assert sum(profile.sent_bytes for profile in bucket_profiles(plan.setting, segments)) == plan.sent_bytes


@pytest.mark.parametrize("preset", [name for name in FIXED if make_config(name).coder == "fixed"])
def test_every_preset_has_a_profile(preset: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StabilityWarning)
        config = resolve(make_config(preset), RANKS)
    plan = Plan([Segment(0, 1 << 20, False)], setting_of(config, RANKS, torch.float32))
    profiles = bucket_profiles(plan.setting, (Segment(0, 1 << 20, False),))
    assert len(profiles) >= 1
    assert sum(profile.sent_bytes for profile in profiles) == plan.sent_bytes


def test_messages_of_unknown_length_are_refused() -> None:
    config = resolve(make_config("qsgd_elias"), RANKS)
    with pytest.raises(ConfigError, match="length depends on the gradients"):
        bucket_profiles(setting_of(config, RANKS, torch.float32), (Segment(0, 5000, False),))


@settings(max_examples=25)
@given(
    rates=st.tuples(st.floats(1e6, 1e11), st.floats(1e6, 1e11)),
    name=st.sampled_from(sorted(FIELDS)),
    cores=st.sampled_from([1.0, 8.0]),
)
def test_a_faster_link_never_makes_a_step_much_longer(rates: tuple[float, float], name: str, cores: float) -> None:
    """A change of the order of pieces may cost a little: a thread may take up a long task before a short one."""
    config = GQSGDConfig(bits=4, sample_every=0, **FIELDS[name])
    slow, fast = sorted(rates)
    steps = []
    for rate in (slow, fast):
        collectives = collectives_between(2, 2, Link(rate, 1e-5), Link(1e11))
        steps.append(
            predict(_timeline(300_000, 600_000), _costs(collectives=collectives, cores=cores), 4, config).step_s
        )
    assert steps[1] <= steps[0] * 1.02


def test_a_sweep_of_rates_falls_towards_the_computation() -> None:
    steps = []
    for rate in (1e7, 1e8, 1e9, 1e12):
        costs = replace(ESTIMATES["h100"], collectives=collectives_between(4, 1, Link(rate), Link(1e12)))
        steps.append(predict(_timeline(5_000_000, 5_000_000), costs, 4, GQSGDConfig(sample_every=0)).step_s)
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == pytest.approx(0.16, rel=0.01)


def test_ranks_of_a_node_share_its_link_in_an_all_to_all_and_not_in_a_ring() -> None:
    costs = collectives_between(2, 4, Link(1e9), Link(1e12))
    assert costs["all sum/float32"].beta_s == pytest.approx(1e-9)
    assert costs["all all_to_all"].beta_s == pytest.approx(4 * 4 / 7 * 1e-9)
    assert costs["peers all_gather"].beta_s == pytest.approx(4e-9)
    assert costs["node all_gather"].beta_s == pytest.approx(1e-12)


def test_starting_a_collective_takes_longer_with_more_ranks() -> None:
    thread, streams = _costs(), _costs(on_streams=True)
    thread, streams = (replace(c, collectives={"all max": Collective(1.0, BETA)}) for c in (thread, streams))
    assert at_ranks(thread, 2, 8).collective("all", "max").alpha_s == pytest.approx(7)
    assert at_ranks(streams, 2, 8).collective("all", "max").alpha_s == pytest.approx(3)


@pytest.mark.parametrize(("on_streams", "of_all", "of_peers"), [(False, 31 / 7, 7), (True, 5 / 3, 3)])
def test_starting_a_collective_between_nodes_takes_longer_with_more_nodes(
    on_streams: bool, of_all: float, of_peers: float
) -> None:
    collectives = {f"{scope} max": Collective(1.0, BETA, cpu_s=0.5) for scope in ("all", "peers", "node")}
    costs = at_ranks(_costs(on_streams=on_streams, collectives=collectives), 8, 32, per_node=4)
    for scope, scale in (("all", of_all), ("peers", of_peers), ("node", 1)):
        cost = costs.collective(scope, "max")
        assert (cost.alpha_s, cost.cpu_s, cost.beta_s) == (pytest.approx(scale), pytest.approx(scale / 2), BETA)


def test_a_faster_link_carries_no_more_bytes_than_processors_can_feed() -> None:
    cost = Collective(1.0, beta_s=8e-9, cpu_beta_s=1e-9, alone_s=2e-9)
    assert on_faster_link(cost, 10, cores=2.0) == replace(cost, beta_s=8e-10, alone_s=2e-10)
    assert on_faster_link(cost, 100, cores=2.0).beta_s == pytest.approx(5e-10)
    assert on_faster_link(cost, 0.1, cores=2.0).beta_s == pytest.approx(8e-8)
    shared = replace(cost, cpu_beta_s=32e-9)  # processor-seconds of several ranks in turns
    assert [on_faster_link(shared, factor, cores=2.0).beta_s for factor in (1, 100)] == [8e-9, 8e-9]


def test_missing_costs_are_named_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"codec 'eden/2'.*gqsgd probe --bits"):
        predict(_timeline(5000), _costs(), RANKS, GQSGDConfig(bits=2))
    with pytest.raises(ConfigError, match=r"'sum/float32' between ranks.*gqsgd probe"):
        predict(_timeline(5000), _costs(collectives={}), RANKS, "native")
    with pytest.raises(ConfigError, match="'fp8' is not 'native', 'bf16' or a GQSGDConfig"):
        predict(_timeline(5000), _costs(), RANKS, "fp8")


def test_buckets_of_a_model_are_those_of_ddp() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 8000), nn.Linear(8000, 300), nn.Linear(300, 10))
    line = estimated(model, 0.2)
    # In reverse order: at least 1 MiB, then at least 25 MiB, then the rest.
    assert [bucket.numel for bucket in line.buckets] == [10 + 3000 + 300 + 2_400_000, 8000 + 8_000_000]
    assert line.buckets[-1].ready_s == pytest.approx(0.2)
    assert line.forward_s == pytest.approx(0.1)
    assert Timeline.from_dict(line.to_dict()) == line


def test_a_timeline_keeps_its_batch_and_files_without_one_are_read() -> None:
    line = _timeline(1000)
    assert "batch" not in line.to_dict()
    assert Timeline.from_dict(line.to_dict()).batch is None
    assert Timeline.from_dict(replace(line, batch=2).to_dict()) == replace(line, batch=2)
    with pytest.raises(ConfigError, match="the timeline's batch is 0, and not an integer from 1 on"):
        Timeline.from_dict({**line.to_dict(), "batch": 0})


def test_ready_times_have_to_rise() -> None:
    segment = Segment(0, 10, False)
    with pytest.raises(ConfigError, match="have to rise"):
        Timeline((Bucket((segment,), 0.2), Bucket((segment,), 0.1)), 0.3)


def test_the_papers_closed_form() -> None:
    plain = tree_seconds(1e9, 4, latency_s=1e-5, bytes_per_s=5e9, reduce_bytes_per_s=2e12)
    assert plain == pytest.approx(4e-5 + 4 * 1e9 / 5e9 + 2 * 1e9 / 2e12)
    coded = tree_seconds(1e9, 4, latency_s=1e-5, bytes_per_s=5e9, reduce_bytes_per_s=2e12, ratio=4, slowdown=79)
    assert coded == pytest.approx(4e-5 + 4 * 0.25e9 / 5e9 + 2 * 79 * 0.25e9 / 2e12)


@pytest.mark.parametrize(
    ("bits", "words"),
    [((), r"bits=\(\) names no number of bits"), ((4, 9), "bits=9 is out of range"), ((16,), "bits=16 has no codes")],
)
def test_widths_are_checked_before_anything_is_measured(bits: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):  # without a process group, of which nothing is asked yet
        measure(torch.device("cpu"), "a probe", bits)


@pytest.mark.slow
def test_a_profile_does_not_load_torchs_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from lightning_gqsgd import GQSGDConfig\n"
        "from lightning_gqsgd.kernels.layout import Segment\n"
        "from lightning_gqsgd.predict.profile import bucket_profiles\n"
        "from lightning_gqsgd.config.resolving import resolve, setting_of\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "bucket_profiles(setting_of(resolve(GQSGDConfig(), 2), 2, torch.float32), (Segment(0, 1000, raw=False),))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    ended_well("-c", code, timeout=100)
