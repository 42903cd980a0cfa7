"""`gqsgd advise`: what it says of clusters, and what it says of options that make no sense."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gqsgd.cli import advising
from lightning_gqsgd.cli.advising import Question
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.predict import Bucket, Collective, Costs, Gamma, Timeline, advice, models
from lightning_gqsgd.predict.costs import ESTIMATES, KINDS
from lightning_gqsgd.predict.probe import Probe
from lightning_gqsgd.presets import LOCAL_PRESETS
from tests.commands import output_of, refusal

HERE = "tests.unit.test_advise"
USUAL = ["--model", f"{HERE}:network", "--batch", "8", "--nodes", "4", "--backward", "50ms"]


def network() -> tuple[nn.Module, tuple[Any, ...]]:
    """A model that the command line names."""
    return nn.Sequential(nn.Linear(1000, 2000), nn.ReLU(), nn.Linear(2000, 1000)), (torch.zeros(1, 1000),)


def no_model() -> int:
    """What is no model."""
    return 1


_run, _refusal = partial(output_of, "advise"), partial(refusal, "advise")


def _cluster(**options: Any) -> advice.Cluster:
    """The cluster of four nodes that options describe."""
    given = {"model": f"{HERE}:network", "batch": 8, "nodes": 4, "gpus_per_node": 1, "backward": "50ms", **options}
    return Question(**{**dict.fromkeys(field.name for field in fields(Question)), **given}).cluster()


def _json(*arguments: str) -> Any:
    return json.loads(_run(*arguments, "--json"))


def _probe(path: Path, **fields: Any) -> Probe:
    kinds = {f"all {kind}": Collective(1e-3, 1e-8) for kind in KINDS}
    costs = Costs(kinds, {f"companded/{bits}": Gamma(1e-9, 1e-9, 1e-9) for bits in (8, 4)}, 1e-10, 1e-5, 1.0)
    line = Timeline((Bucket((Segment(0, 5_000_000, False),), 0.1),), 0.1, 0.05, 0.01, name="mine", batch=8)
    probe = Probe(costs, 2, 1, "gloo", "CPU", 3.0, (line,))
    probe = replace(probe, **fields)
    probe.save(path)
    return probe


def test_a_slow_link_gets_few_bits_and_a_fast_one_plain_ddp() -> None:
    slow, fast = (_json(*USUAL, "--link", rate) for rate in ("1gbit", "800gbit"))
    assert slow["recommendation"].startswith("Take bits=")
    assert "waits" in slow["recommendation"]
    assert fast["recommendation"].startswith("Not worth it: ")
    assert fast["recommendation"].endswith("keep plain DDP.")


def test_every_candidate_has_its_numbers() -> None:
    advised = _json(*USUAL, "--link", "1gbit", "--gpus-per-node", "2")
    names = [candidate["name"] for candidate in advised["candidates"]]
    assert names[:3] == ["fp32", "bf16", "8 bit"]
    assert {"4 bit", "3 bit", "2 bit", "4 bit, hierarchical"} <= set(names)
    plain = advised["candidates"][0]
    assert plain["sent_bytes"] == 2 * 7 * advised["parameters"] * 4 // 8
    assert plain["step_s"] == pytest.approx(0.075 + plain["exposed_s"])
    assert plain["samples_per_s"] == pytest.approx(8 * 8 / plain["step_s"])
    assert plain["efficiency"] == pytest.approx(0.075 / plain["step_s"])


def test_one_rank_per_node_has_no_second_level() -> None:
    assert all("hierarchical" not in row["name"] for row in _json(*USUAL, "--link", "1gbit")["candidates"])


def test_fewer_bits_than_four_are_predicted_and_never_recommended() -> None:
    advised = _json(*USUAL, "--link", "1mbit")
    steps = {row["name"]: row["step_s"] for row in advised["candidates"]}
    assert steps["2 bit"] < steps["4 bit"]
    assert advised["recommendation"].startswith("Take bits=4")


def test_trellis_codes_are_predicted_where_their_cost_is_known() -> None:
    """They send no more than other codes of two bits, and take more of the processor's time."""
    cpu, gpu = (_json(*USUAL, "--link", "1mbit", "--codec", codec) for codec in ("cpu", "h100"))
    rows = {row["name"]: row for row in cpu["candidates"]}
    assert rows["2 bit, trellis"]["sent_bytes"] <= rows["2 bit"]["sent_bytes"]
    assert rows["2 bit, trellis"]["codec_s"] > 1.5 * rows["2 bit"]["codec_s"]
    assert cpu["recommendation"].startswith("Take bits=4")
    assert all("trellis" not in row["name"] for row in gpu["candidates"])


def test_local_steps_are_advised_where_steps_of_few_bits_wait_most_of_their_time() -> None:
    slow, fast = (_json(*USUAL, "--link", rate) for rate in ("1mbit", "10gbit"))
    four = next(row for row in slow["candidates"] if row["name"] == "4 bit")
    local = slow["local_steps"]
    assert local["name"] == "4 bit, every 32 steps"
    assert local["sent_bytes"] == pytest.approx(four["sent_bytes"] / 32, abs=1)
    assert local["exposed_s"] == pytest.approx(four["wire_s"] / 32, rel=0.02)  # nothing is computed beside an average
    assert local["step_s"] == pytest.approx(local["compute_s"] + local["exposed_s"])
    assert 'strategy="gqsgd_diloco" averages models every 32 steps' in slow["recommendation_of_local_steps"]
    assert f"{four['step_s'] / local['step_s']:.2f} times faster than 4 bit" in slow["recommendation_of_local_steps"]
    assert fast["recommendation_of_local_steps"] is None
    shown = _run(*USUAL, "--link", "1mbit")
    assert slow["recommendation_of_local_steps"] in shown
    assert "4 bit, every 32 steps" in shown


def test_local_steps_are_predicted_as_their_preset_makes_them() -> None:
    preset = LOCAL_PRESETS["gqsgd_diloco"]
    assert (preset.options["every"], preset.compression.config.num_bits) == (advice.LOCAL_STEPS, advice.LOCAL_BITS)


def test_a_probe_without_these_codes_predicts_no_local_steps(tmp_path: Path) -> None:
    costs = _probe(tmp_path / "p.json").costs
    _probe(tmp_path / "p.json", costs=replace(costs, gammas={"companded/8": costs.gammas["companded/8"]}))
    advised = _json("--probe", str(tmp_path / "p.json"))
    assert (advised["local_steps"], advised["recommendation_of_local_steps"]) == (None, None)


def test_the_table_says_that_numbers_of_gpus_are_estimates() -> None:
    output = _run(*USUAL, "--link", "10gbit")
    assert "Note: codec: h100: an estimate from memory bandwidth, not a measurement; it is assumed" in output
    assert "codec h100 (assumed): predicted" in output
    assert "…" not in output


def test_the_codec_of_any_gpu_is_estimated_from_the_bandwidth_of_its_memory() -> None:
    words = [*USUAL, "--link", "10gbit", "--gpus-per-node", "2"]
    output = _run(*words, "--codec", "600GB/s")
    assert "Note: codec: 600GB/s: an estimate from memory bandwidth, not a measurement." in output
    assert "Note: between the ranks of a node: 200gbit in each direction; --intra changes it." in output
    same = ["--intra", "3.6tbit"]
    (fast, *_), (named, *_), (slow, *_) = (
        _json(*words, *same, "--codec", codec)["candidates"][::-1] for codec in ("3.35 TB/s", "h100", "600GB/s")
    )
    assert fast == named
    assert slow["codec_s"] > 2 * fast["codec_s"] > 0


def test_a_probe_with_a_timeline_needs_nothing_else(tmp_path: Path) -> None:
    _probe(tmp_path / "p.json")
    advised = _json("--probe", str(tmp_path / "p.json"))
    assert (advised["model"], advised["nodes"]) == ("mine", 2)
    assert advised["candidates"][0]["step_s"] == pytest.approx(0.16 + 1e-3 + 20_000_000 * 1e-8, rel=0.02)
    assert advised["notes"] == ["codec: measured on CPU"]


def _probe_of_nodes(path: Path) -> Probe:
    """A probe of two nodes with four ranks each. Collectives inside a node are a hundred times faster."""
    of_links = {f"{scope} {kind}": Collective(1e-2, 1e-8) for scope in ("all", "peers") for kind in KINDS}
    inside = {f"node {kind}": Collective(1e-4, 1e-10) for kind in KINDS}
    costs = replace(_probe(path).costs, collectives=of_links | inside)
    return _probe(path, costs=costs, ranks=8, per_node=4)


def test_a_probe_of_several_nodes_predicts_one_node_without_the_network_between_nodes(tmp_path: Path) -> None:
    probe = _probe_of_nodes(tmp_path / "p.json")
    costs_at = advice.over_probe(probe.costs, probe.ranks, probe.per_node)
    for factor in (1.0, 0.1):  # the link between nodes has no effect on a single node
        assert {costs_at(1, factor).collective("all", kind) for kind in KINDS} == {Collective(1e-4, 1e-10)}
    assert costs_at(2, 1.0).collective("all", "max") == Collective(1e-2, 1e-8)
    plain = _json("--probe", str(tmp_path / "p.json"), "--nodes", "1")["candidates"][0]
    assert plain["exposed_s"] < 0.01
    assert advice.over_probe(_probe(tmp_path / "q.json").costs, 2, 2)(1, 1.0).collective("all", "max").beta_s == 1e-8


def test_a_sweep_of_a_probe_ends_where_processors_feed_no_more_bytes(tmp_path: Path) -> None:
    kinds = {f"all {kind}": Collective(1e-3, 1e-8, cpu_beta_s=1e-9) for kind in KINDS}
    probe = _probe(tmp_path / "p.json", costs=replace(_probe(tmp_path / "p.json").costs, collectives=kinds))
    made = advice.candidates(
        advice.Cluster(probe.timelines[0], advice.over_probe(probe.costs, 2, 1), 2, 1, 8), factor=100
    )
    plain = made[0].prediction
    assert plain.wire_s == pytest.approx(1e-9 * plain.sent_bytes)  # on one processor


def test_a_link_takes_the_place_of_the_one_that_was_measured(tmp_path: Path) -> None:
    _probe(tmp_path / "p.json")
    slow = _json("--probe", str(tmp_path / "p.json"), "--link", "10mbit")
    assert slow["candidates"][0]["step_s"] > 10


def test_sweeps_and_steps_are_drawn(tmp_path: Path) -> None:
    sweep, gantt = tmp_path / "sweep.png", tmp_path / "gantt.png"
    _run(*USUAL, "--link", "10gbit", "--plot", str(sweep), "--gantt", str(gantt))
    for picture in (sweep, gantt):
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("backward", ["50ms", "20s"])  # steps over several decades, and over a hundredth of one
def test_sweeps_say_what_their_lines_and_ticks_are(tmp_path: Path, backward: str) -> None:
    sweep = tmp_path / "sweep.svg"
    _run(*USUAL, "--backward", backward, "--link", "100mbit", "--plot", str(sweep))
    texts = re.findall("<!-- (.*) -->", sweep.read_text())
    assert texts.count("this cluster") == 2
    assert not [text for text in texts if "^" in text]  # numbers, and not powers
    assert len([text for text in texts[texts.index("rate of the links (Gbit/s)") :] if text[0].isdigit()]) >= 3


def test_a_given_latency_counts_for_each_segment_over_gloo_and_for_each_level_of_a_tree_over_nccl() -> None:
    costs = {codec: _cluster(link="1gbit", latency="40ms", codec=codec).costs_at(4, 1.0) for codec in ESTIMATES}
    assert {codec: one.latency_s for codec, one in costs.items()} == {"h100": 0.0, "a100": 0.0, "cpu": 0.04}
    alphas = {codec: one.collective("all", "all_gather").alpha_s for codec, one in costs.items()}
    assert alphas == pytest.approx({"h100": 0.08, "a100": 0.08, "cpu": 0.0})


def test_a_latency_between_nodes_has_no_effect_on_a_single_node() -> None:
    words = [*USUAL, "--nodes", "1", "--gpus-per-node", "4", "--link", "1gbit", "--codec", "cpu", "--latency"]
    short, long = (_json(*words, latency) for latency in ("1ms", "200ms"))
    assert short["candidates"] == long["candidates"]
    assert short["over_nodes"][1]["candidates"] != long["over_nodes"][1]["candidates"]


def test_the_break_even_is_where_plain_ddp_begins_to_be_the_best() -> None:
    sweep = advice.over_rates(_cluster(link="1gbit", latency="10us", codec="h100"))
    limit = advice.break_even(sweep)
    assert limit is not None
    assert limit > 1
    for factor, advised in sweep.items():
        assert (advice.best_of(advised) is advised[0]) == (factor >= limit)
    slower = {factor: advised for factor, advised in sweep.items() if factor < limit}
    faster = {factor: advised for factor, advised in sweep.items() if factor >= limit}
    assert advice.break_even(slower) is None  # something is worth a change on all of them
    assert advice.break_even(faster) is None  # nothing is, so the break-even is below them


def test_one_node_has_no_break_even_because_the_link_between_nodes_has_no_effect(tmp_path: Path) -> None:
    advised = _json(*USUAL, "--link", "1gbit", "--nodes", "1", "--gpus-per-node", "4", "--codec", "h100")
    assert advised["recommendation"].startswith("Not worth it")
    assert advised["break_even"] is None
    _run(*USUAL, "--link", "1gbit", "--nodes", "1", "--gpus-per-node", "4", "--plot", str(tmp_path / "sweep.svg"))
    assert "break-even" not in (tmp_path / "sweep.svg").read_text()


def test_memory_has_no_exponent() -> None:
    shown = [advising._gigabytes(nbytes) for nbytes in (0.81e9, 1.3e9, 130e9, 16e12)]
    assert shown == ["0.81 GB", "1.3 GB", "130 GB", "16,000 GB"]


def test_faster_links_never_lead_to_fewer_bits() -> None:
    cluster = _cluster(link="100mbit", latency="10us", nodes=2, codec="h100")
    places = []
    for exponent in range(40):
        choices = advice.candidates(cluster, factor=1.15**exponent)
        places.append([candidate.name for candidate in choices].index(advice.best_of(choices).name))
    assert places == sorted(places, reverse=True)
    assert len(set(places)) > 2


def test_operations_count_a_convolution_once_for_each_position() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(2 * 16, 5, bias=False))
    built = models.Built("x", model, (torch.zeros(1, 1, 4, 4),))
    assert models.operations(built) == [2 * 9 * 16, 2 * 16 * 5]


def test_positions_that_are_added_take_no_more_of_the_computation_than_a_weight_of_their_size() -> None:
    class WithPositions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.zeros(1, 7, 16))
            self.mix = nn.Conv1d(7, 7, 3, padding=1, bias=False)
            self.dense = nn.Linear(16, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dense(self.mix(x + self.positions))

    built = models.Built("x", WithPositions(), (torch.zeros(1, 7, 16),))
    assert models.operations(built) == [7 * 16 * 7, 7 * 7 * 3 * 16, 16 * 16 * 7]


@pytest.mark.parametrize("kind", ["t5", "vit"])
def test_models_that_take_images_and_that_decode_what_they_have_encoded_are_called(kind: str) -> None:
    pytest.importorskip("transformers")
    built = models.build(f"transformers:{kind}", 1, torch.device("meta"))
    assert models.operations(built)


def test_a_module_computes_on_the_usual_device_while_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import torch\nWIDTH = int(torch.tensor(8))\n\n\ndef make():\n    return torch.nn.Linear(WIDTH, WIDTH)\n"
    (tmp_path / "module_of_user.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    built = models.build("module_of_user:make", 1, torch.device("meta"))
    assert built.model.weight.is_meta


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise RuntimeError('no operator')", r"cannot be loaded \(no operator\): pip install --force-reinstall"),
        ("import no_such_module", r"cannot be loaded \(No module named 'no_such_module'\): pip"),
        (
            "raise ModuleNotFoundError('no compiled part', name='torchvision._C')",
            r"cannot be loaded \(no compiled part\): pip install --force-reinstall",
        ),
        (None, "is not installed: pip install torchvision, or name your own factory$"),
    ],
)
def test_a_package_that_cannot_be_loaded_is_told_from_one_that_is_not_there(
    source: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, module)
    if source is None:
        monkeypatch.setitem(sys.modules, "torchvision", None)
    else:
        (tmp_path / "torchvision.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"^model torchvision:resnet18 needs torchvision, which {words}"):
        models.build("torchvision:resnet18", 1, torch.device("meta"))


def test_a_configuration_without_a_model_names_its_type() -> None:
    auto = pytest.importorskip("transformers.models.auto")
    kind = next(kind for kind in auto.CONFIG_MAPPING if kind not in auto.modeling_auto.MODEL_MAPPING_NAMES)
    with pytest.raises(ConfigError, match=f"^transformers:{kind} is a .*, which no AutoModel has; name another type$"):
        models.build(f"transformers:{kind}", 1, torch.device("meta"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--link", "10"], "--link '10' is not a number and a unit; write e.g. 100mbit"),
        (["--link", "0gbit"], "has to be more than 0"),
        (["--link", "9" * 320 + "gbit"], "999...' is out of range: 1bit to 1000000tbit; write a number"),
        (["--link", "nan"], "--link 'nan' is not a number and a unit"),
        (["--backward", "9" * 320 + "s"], "is out of range: 0.000001us to 1000000s; write a number"),
        (["--latency", "5"], "--latency '5' is not a number and a unit; write e.g. 50us"),
        (["--backward", "120"], "--backward '120' is not a number and a unit"),
        (["--nodes", "0"], "--nodes 0 has to be at least 1"),
        (["--batch", "0"], "--batch 0 has to be at least 1"),
        (["--batch", "99999999999999999999"], "--batch 99999999999999999999 has to be at most 1,000,000"),
        (["--nodes", "8193"], "--nodes 8193 with 1 rank each are more than 8,192 ranks"),
        (["--nodes", "9" * 30, "--gpus-per-node", "8"], "are more than 8,192 ranks, which is the most"),
        (
            ["--local-steps", "/nowhere/x.json"],
            "--backward: no effect beside --local-steps, whose file has all numbers",
        ),
        (["--gpus-per-node", "-1"], "--gpus-per-node -1 has to be at least 1"),
        (["--codec", "h200"], "--codec='h200' is not one of 'h100'"),
        (["--codec", "a10"], "'measured'; for another GPU, give the rated bandwidth of its memory, e.g. 600GB/s"),
        (["--codec", "600"], "--codec '600' is not a number and a unit; write e.g. 600GB/s or 3.35TB/s"),
        (["--codec", "600gbit"], "--codec '600gbit' is not a number and a unit; write e.g. 600GB/s or 3.35TB/s"),
        (["--codec", "0GB/s"], "--codec '0GB/s' has to be more than 0"),
        (["--codec", "measured"], "--codec measured needs a measurement; give --probe FILE"),
        (
            ["--probe", "/nowhere/probe.json"],
            "/nowhere/probe.json cannot be read (No such file or directory); give a file that `gqsgd probe",
        ),
        (["--plot", "/nowhere/a.png"], "cannot be written"),
        (["--plot", "a.nothing"], "has no suffix of a picture"),
        (["--plot", "/dev/a.png", "--gantt", "/dev/a.nothing"], "has no suffix of a picture"),
        (["--plot", "a.png", "--gantt", "./a.png"], "--plot and --gantt name one file, a.png; name two files"),
        (["--gantt", "/"], "has no suffix of a picture"),
    ],
)
def test_what_makes_no_sense_exits_with_2_and_one_line_before_a_model_is_built(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "build", None)
    assert words in _refusal(*USUAL, "--link", "1gbit", *arguments)


def test_one_rank_is_refused() -> None:
    assert "one rank sends nothing" in _refusal(*USUAL, "--link", "1gbit", "--nodes", "1")


def test_what_is_missing_is_asked_for() -> None:
    assert "give --link, e.g. 10gbit, with --model and --backward, or --probe FILE" in _refusal(
        "--model", f"{HERE}:network", "--backward", "1s"
    )
    assert "give --backward, e.g. 120ms" in _refusal("--model", f"{HERE}:network", "--link", "1gbit")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"version": 0}', "is not a probe of version 2 (its version: 0); run `gqsgd probe --output"),
        ("[1]", "is not a probe of version 2 (its version: None)"),
        ("no json", "is not JSON"),
    ],
)
def test_a_file_that_is_no_probe_of_this_version_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "p.json").write_text(text)
    assert words in _refusal("--probe", str(tmp_path / "p.json"))


def test_a_model_that_the_probe_does_not_have_is_asked_for(tmp_path: Path) -> None:
    _probe(tmp_path / "p.json")
    assert "(the probe has mine)" in _refusal("--probe", str(tmp_path / "p.json"), "--model", "torchvision:resnet18")


def _timed(path: Path, batch: int | None) -> list[str]:
    """A probe whose timeline has a batch, and the options that name it."""
    probe = _probe(path)
    replace(probe, timelines=(replace(probe.timelines[0], batch=batch),)).save(path)
    return ["--probe", str(path)]


def test_samples_are_those_of_the_batch_that_was_measured(tmp_path: Path) -> None:
    words = _timed(tmp_path / "p.json", 2)
    for advised in (_json(*words), _json(*words, "--batch", "2")):
        assert advised["batch"] == 2
        plain = advised["candidates"][0]
        assert plain["samples_per_s"] == pytest.approx(2 * 2 / plain["step_s"])


def test_another_batch_than_the_measured_one_is_refused(tmp_path: Path) -> None:
    line = _refusal(*_timed(tmp_path / "p.json", 2), "--batch", "32")
    assert "p.json has the step of mine at batch 2; leave out --batch, run `gqsgd probe --model mine" in line


def test_the_time_of_another_batch_may_be_given_beside_a_probe(tmp_path: Path) -> None:
    words = ["--model", f"{HERE}:network", "--backward", "50ms"]
    assert _json(*_timed(tmp_path / "p.json", 2), *words, "--batch", "8")["batch"] == 8
    assert _json(*_timed(tmp_path / "p.json", 2), *words)["batch"] == 32


def test_a_probe_without_a_batch_says_no_samples_unless_the_batch_is_given(tmp_path: Path) -> None:
    words = _timed(tmp_path / "p.json", None)
    assert "batch" not in json.loads((tmp_path / "p.json").read_text())["timelines"][0]
    advised = _json(*words)
    assert (advised["batch"], advised["candidates"][0]["samples_per_s"]) == (None, None)
    assert "Note: samples/s: not known, because the probe does not say its batch; give --batch." in _run(*words)
    assert _json(*words, "--batch", "4")["candidates"][0]["samples_per_s"] > 0


def test_a_rate_inside_nodes_is_refused_where_nodes_have_one_rank() -> None:
    line = _refusal(*USUAL, "--link", "1gbit", "--intra", "5gbit")
    assert "--intra 5gbit has no effect on nodes with one rank; leave it out, or give --gpus-per-node" in line
    _run(*USUAL, "--link", "1gbit", "--intra", "5gbit", "--gpus-per-node", "2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--latency", "5us"], "--latency 5us has no effect on the network that --probe measured"),
        (["--intra", "5gbit"], "--intra 5gbit has no effect on the network that --probe measured"),
        (["--forward", "5ms"], "--forward 5ms has no effect without --backward; give both"),
        (["--forward", "5ms", "--link", "1gbit"], "--forward 5ms has no effect without --backward; give both"),
    ],
)
def test_options_that_a_probe_leaves_without_effect_are_refused(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    assert words in _refusal(*_timed(tmp_path / "p.json", 2), *arguments)


def raises() -> nn.Module:
    """A factory that fails with a text of two lines."""
    raise RuntimeError("no model\ntoday")


def needs_an_argument(width: int) -> nn.Module:
    """A factory that nobody can call without an argument."""
    return nn.Linear(width, 1)


def ends() -> nn.Module:
    """A factory that ends the process."""
    raise SystemExit(3)


def lazy() -> nn.Module:
    """A model whose parameters have no size."""
    return nn.LazyLinear(3)


def imaginary() -> nn.Module:
    """A model of complex parameters."""
    return nn.Linear(4, 3, dtype=torch.complex64)


def no_tuple() -> tuple[nn.Module, int]:
    """A model, and inputs that are no tuple."""
    return nn.Linear(4, 3), 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{HERE}:raises", "cannot be built: RuntimeError: no model today; name a model that can be built"),
        (
            f"{HERE}:needs_an_argument",
            "missing 1 required positional argument: 'width'; name a model that can be built",
        ),
        (f"{HERE}:ends", "cannot be built: SystemExit: 3; name a model"),
        (f"{HERE}:lazy", "weight has no size before the first forward pass; give its layer a size"),
        (f"{HERE}:imaginary", "weight has the dtype torch.complex64; give it one of torch.float32"),
        (f"{HERE}:no_tuple", "returned inputs of type int; return a tensor, or a tuple"),
        ("torchvision:resnt50", "torchvision has no model 'resnt50'; did you mean 'resnet50'?"),
        ("transformers:gpt22", "nor a folder or file with a configuration; did you mean 'gpt2'? (nothing is "),
        ("resnet50", "is none of torchvision:NAME"),
        ("no_such_module:factory", "No module named 'no_such_module'"),
        (f"{HERE}:nothing", "has no function 'nothing'"),
        (f"{HERE}:no_model", "returned int; return a torch.nn.Module"),
        (":x", "model ':x' is none of torchvision:NAME"),
        ("..:x", "model '..:x' is none of torchvision:NAME"),
        (".a:x", "model '.a:x' is none of torchvision:NAME"),
        ("broken_model:x", "cannot be built: SyntaxError: "),
    ],
)
def test_a_model_that_cannot_be_built_is_one_line(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_model.py").write_text("def x(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert words in _refusal("--model", name, "--link", "1gbit", "--backward", "50ms")


def test_a_detector_is_built_without_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were asked for")

    pytest.importorskip("torchvision")
    monkeypatch.setattr("torch.hub.load_state_dict_from_url", download)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", download)
    built = models.build("torchvision:fasterrcnn_resnet50_fpn", 1, torch.device("meta"))
    assert sum(p.numel() for p in built.model.parameters()) > 40_000_000


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (0.044, "would shorten it by more than 5%; keep"),
        (0.0, "would shorten it; keep"),
        (-0.1, "would shorten it; keep"),
    ],
)
def test_what_is_said_of_compression_that_does_not_pay_is_true(saved: float, words: str) -> None:
    plain, *others = advice.candidates(_cluster(link="800gbit"))
    step = plain.prediction.step_s
    less = [replace(other, prediction=replace(other.prediction, step_s=step * (1 - saved))) for other in others[:3]]
    fewest = replace(others[-1], prediction=replace(others[-1].prediction, step_s=step / 2))
    said = advice.recommendation([plain, *less, fewest])
    assert said.startswith("Not worth it: ")
    assert f"no compression to 4 bits or more {words}" in said


def test_a_sweep_has_no_more_ranks_than_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = _cluster(link="800gbit", gpus_per_node=64)
    monkeypatch.setattr(advice, "candidates", lambda *_, **__: [])
    assert list(advice.over_nodes(cluster)) == [1, 2, 4, 8, 16, 32, 64]
    assert list(advice.over_nodes(replace(cluster, per_node=4)))[-1] == 1024


def test_fsdp_has_its_own_candidates() -> None:
    advised = _json(*USUAL, "--link", "1gbit", "--gpus-per-node", "2", "--fsdp")
    made = {candidate["name"]: candidate for candidate in advised["candidates"]}
    assert list(made)[:5] == ["fp32", "replicas, fp32", "bf16", "replicas, bf16", "bf16, gradients 8 bit"]
    assert {"replicas, bf16, means 4 bit", "weights 8 bit, gradients 4 bit"} <= set(made)
    assert advised["fsdp"] is True
    assert advised["local_steps"] is None
    # Both layers are gathered twice and reduce-scattered, among 8 ranks.
    assert made["fp32"]["sent_bytes"] == pytest.approx(3 * 7 / 8 * 4 * advised["parameters"], rel=1e-3)
    assert made["weights 8 bit, gradients 4 bit"]["step_s"] < made["bf16"]["step_s"] < made["fp32"]["step_s"]
    assert "than FSDP2" in advised["recommendation"]
    assert "register_gqsgd_fsdp(model, " in advised["recommendation"]
    assert any(note.startswith("fully_shard: on 2 blocks, which") for note in advised["notes"])
    assert any(note.endswith("of the computation by their multiplications") for note in advised["notes"])
    assert any(note.startswith("replicas: ") for note in advised["notes"])
    fast = _json(*USUAL, "--link", "800gbit", "--fsdp")
    assert fast["recommendation"].endswith("keep plain FSDP2.")
    assert not any(name.startswith("replicas") for name in (candidate["name"] for candidate in fast["candidates"]))


def without_inputs() -> nn.Module:
    """A model whose operations cannot be counted."""
    return network()[0]


def test_fsdp_says_what_the_shares_of_the_computation_are() -> None:
    named = ["--model", f"{HERE}:without_inputs", *USUAL[2:]]
    notes = _json(*named, "--link", "1gbit", "--fsdp")["notes"]
    assert any(note.endswith("of the computation by their size") for note in notes)


def test_fsdp_of_a_probe_builds_the_model_that_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    line = Timeline((Bucket((Segment(0, 4_000_000, False),), 0.1),), 0.1, 0.05, 0.01, name=f"{HERE}:network", batch=8)
    _probe(path, timelines=(line,))
    made = {candidate["name"]: candidate for candidate in _json("--probe", str(path), "--fsdp")["candidates"]}
    assert made["fp32"]["compute_s"] == pytest.approx(0.15 + 0.01 / 2)
    _probe(path)
    assert "mine" in _refusal("--probe", str(path), "--fsdp")
