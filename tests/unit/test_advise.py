"""`gqsgd advise`: what it says of clusters, and what it says of options that make no sense."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from lightning_gqsgd.cli.app import app
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.layout import Segment
from lightning_gqsgd.performance import Bucket, Collective, Costs, Gamma, Timeline, advice, models
from lightning_gqsgd.performance.costs import KINDS
from lightning_gqsgd.performance.probe import Probe
from lightning_gqsgd.performance.units import bytes_per_second, rate_in_words, seconds

HERE = "tests.unit.test_advise"
USUAL = ["--model", f"{HERE}:network", "--batch", "8", "--nodes", "4", "--backward", "50ms"]


def network() -> tuple[nn.Module, tuple[Any, ...]]:
    """A model that the command line names."""
    return nn.Sequential(nn.Linear(1000, 2000), nn.ReLU(), nn.Linear(2000, 1000)), (torch.zeros(1, 1000),)


def no_model() -> int:
    """What is no model."""
    return 1


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["advise", *arguments])


def _json(*arguments: str) -> Any:
    result = _run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def _probe(path: Path, **fields: Any) -> Probe:
    kinds = {f"all {kind}": Collective(1e-3, 1e-8) for kind in KINDS}
    costs = Costs(kinds, {f"companded/{bits}": Gamma(1e-9, 1e-9, 1e-9) for bits in (8, 4)}, 1e-10, 1e-5, 1.0)
    line = Timeline((Bucket((Segment(0, 5_000_000, False),), 0.1),), 0.1, 0.05, 0.01, name="mine")
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


def test_the_table_says_that_numbers_of_gpus_are_estimates() -> None:
    result = _run(*USUAL, "--link", "10gbit")
    assert result.exit_code == 0, result.output
    assert "Note: codec: h100: an estimate from memory bandwidth, not a measurement." in result.stdout
    assert "…" not in result.stdout


def test_a_probe_with_a_timeline_needs_nothing_else(tmp_path: Path) -> None:
    _probe(tmp_path / "p.json")
    advised = _json("--probe", str(tmp_path / "p.json"))
    assert (advised["model"], advised["nodes"]) == ("mine", 2)
    assert advised["candidates"][0]["step_s"] == pytest.approx(0.16 + 1e-3 + 20_000_000 * 1e-8, rel=0.02)
    assert advised["notes"] == ["codec: measured on CPU"]


def test_a_probe_is_read_as_it_was_written(tmp_path: Path) -> None:
    probe = _probe(tmp_path / "p.json")
    assert Probe.load(tmp_path / "p.json") == probe


def test_a_link_takes_the_place_of_the_one_that_was_measured(tmp_path: Path) -> None:
    _probe(tmp_path / "p.json")
    slow = _json("--probe", str(tmp_path / "p.json"), "--link", "10mbit")
    assert slow["candidates"][0]["step_s"] > 10


def test_sweeps_and_steps_are_drawn(tmp_path: Path) -> None:
    sweep, gantt = tmp_path / "sweep.png", tmp_path / "gantt.png"
    result = _run(*USUAL, "--link", "10gbit", "--plot", str(sweep), "--gantt", str(gantt))
    assert result.exit_code == 0, result.output
    for picture in (sweep, gantt):
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_break_even_is_where_plain_ddp_begins_to_be_the_best() -> None:
    question = {"model": f"{HERE}:network", "batch": 8, "probe": None, "link": "1gbit", "latency": "10us"}
    rest = {"intra": "100gbit", "nodes": 4, "gpus_per_node": 1, "backward": "50ms", "forward": None, "codec": "h100"}
    from lightning_gqsgd.cli.advising import Question

    sweep = advice.over_rates(Question(**{**question, **rest}).cluster())
    limit = advice.break_even(sweep)
    assert limit is not None
    assert limit > 1
    for factor, advised in sweep.items():
        assert (advice.best_of(advised) is advised[0]) == (factor >= limit)


def test_operations_count_a_convolution_once_for_each_position() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(2 * 16, 5, bias=False))
    built = models.Built("x", model, (torch.zeros(1, 1, 4, 4),))
    assert models.operations(built) == [2 * 9 * 16, 2 * 16 * 5]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "torchvision:resnt50"], "torchvision has no model 'resnt50'; did you mean 'resnet50'?"),
        (["--model", "transformers:gpt22"], "did you mean 'gpt2'? nor a folder or file"),
        (["--model", "resnet50"], "is none of torchvision:NAME"),
        (["--model", "no_such_module:factory"], "No module named 'no_such_module'"),
        (["--model", f"{HERE}:nothing"], "has no function 'nothing'"),
        (["--model", f"{HERE}:no_model"], "returned int; return a torch.nn.Module"),
        (["--link", "10"], "--link '10' is not a number and a unit; write e.g. 100mbit"),
        (["--link", "0gbit"], "has to be more than 0"),
        (["--latency", "5"], "--latency '5' is not a number and a unit; write e.g. 50us"),
        (["--backward", "120"], "--backward '120' is not a number and a unit"),
        (["--nodes", "0"], "--nodes 0 has to be at least 1"),
        (["--nodes", "1"], "one rank sends nothing"),
        (["--batch", "0"], "--batch 0 has to be at least 1"),
        (["--gpus-per-node", "-1"], "--gpus-per-node -1 has to be at least 1"),
        (["--codec", "h200"], "--codec='h200' is not one of 'h100'"),
        (["--codec", "measured"], "--codec measured needs a measurement; give --probe FILE"),
        (
            ["--probe", "/nowhere/probe.json"],
            "/nowhere/probe.json cannot be read (No such file or directory): run `gqsgd",
        ),
        (["--plot", "/nowhere/a.png"], "cannot be written"),
        (["--plot", "a.nothing"], "has no suffix of a picture"),
    ],
)
def test_what_makes_no_sense_exits_with_2_and_one_line(arguments: list[str], words: str) -> None:
    result = _run(*USUAL, "--link", "1gbit", *arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output


def test_what_is_missing_is_asked_for() -> None:
    network = _run("--model", f"{HERE}:network", "--backward", "1s")
    assert network.exit_code == 2
    assert "give --probe FILE of `gqsgd probe`, or --link" in network.stderr
    backward = _run("--model", f"{HERE}:network", "--link", "1gbit")
    assert backward.exit_code == 2
    assert "give --backward, e.g. 120ms" in backward.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"version": 0}', "is no probe of version 1 (its version: 0): run `gqsgd probe --output"),
        ("[1]", "is no probe of version 1 (its version: None)"),
        ("no json", "is no JSON"),
    ],
)
def test_a_file_that_is_no_probe_of_this_version_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "p.json").write_text(text)
    result = _run("--probe", str(tmp_path / "p.json"))
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_model_that_the_probe_does_not_have_is_asked_for(tmp_path: Path) -> None:
    _probe(tmp_path / "p.json")
    result = _run("--probe", str(tmp_path / "p.json"), "--model", "torchvision:resnet18")
    assert result.exit_code == 2
    assert "(the probe has mine)" in result.stderr


def test_rates_and_durations_have_units() -> None:
    assert bytes_per_second("10gbit", "--link") == 1.25e9
    assert bytes_per_second("2.5 Gbit", "--link") == pytest.approx(0.3125e9)
    assert rate_in_words(1.25e9) == "10gbit"
    assert [seconds(text, "-t") for text in ("50us", "120ms", "1.5s")] == pytest.approx([5e-5, 0.12, 1.5])
    with pytest.raises(ConfigError, match="is not a number and a unit"):
        seconds("1h", "-t")
