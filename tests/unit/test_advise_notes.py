"""What `gqsgd advise` says of its own assumptions, of probes that it cannot use, and the numbers of its sweeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_gqsgd.predict import Costs, advice
from lightning_gqsgd.predict.files import MOST_BYTES
from lightning_gqsgd.predict.probe import Probe
from tests.unit.test_advise import USUAL, _json, _probe, _refusal, _run

HERE = "tests.unit.test_advise_notes"


def with_a_tensor() -> tuple[nn.Module, torch.Tensor]:
    """A model, and the one tensor that it is called with."""
    return nn.Linear(1000, 2000), torch.zeros(3, 1000)


def with_tables() -> nn.Module:
    """A model of two tables with sparse gradients, one of which is not trained, and a dense one."""
    frozen = nn.Embedding(50, 8, sparse=True).requires_grad_(False)
    return nn.ModuleDict(
        {"users": nn.Embedding(1000, 64, sparse=True), "frozen": frozen, "words": nn.Embedding(100, 64)}
    )


def test_a_factory_may_return_one_tensor() -> None:
    advised = _json("--model", f"{HERE}:with_a_tensor", "--link", "1gbit", "--backward", "50ms")
    assert advised["parameters"] == 1000 * 2000 + 2000


def test_tables_with_sparse_gradients_are_named() -> None:
    words = ["--model", f"{HERE}:with_tables", "--link", "1gbit", "--backward", "50ms"]
    said = "sparse gradients: users.weight (0.064 of 0.0704 M parameters) are predicted as if they were dense"
    assert any(note.startswith(said) for note in _json(*words)["notes"])
    assert f"Note: {said}" in _run(*words)
    assert not any("sparse" in note for note in _json(*USUAL, "--link", "1gbit")["notes"])


@pytest.mark.parametrize("codecs", [[], ["companded/2"]])
def test_a_probe_without_times_of_codes_that_can_be_recommended_is_refused(codecs: list[str], tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    costs: Costs = _probe(file).costs
    _probe(file, costs=replace(costs, gammas=dict.fromkeys(codecs, costs.gammas["companded/4"])))
    line = _refusal("--probe", str(file))
    assert f"p.json has times of {codecs[0] if codecs else 'no codec'}, and 4 bits are the fewest" in line
    assert "run `gqsgd probe --bits 8 --bits 4 --output" in line
    _run("--probe", str(file), "--codec", "cpu")


def test_a_device_and_a_file_too_large_are_no_probes(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    for path, words in (
        ("/dev/zero", "is not a regular file; give"),
        (large, "has 16,777,217 bytes, more than 16,777,216"),
    ):
        line = _refusal("--probe", str(path))
        assert words in line


@pytest.mark.slow
def test_ranks_of_a_node_have_the_wires_of_their_device(tmp_path: Path) -> None:
    words = [*USUAL, "--link", "10gbit", "--gpus-per-node", "8"]
    rates = {"h100": "3.6tbit", "a100": "2.4tbit", "cpu": "16gbit"}
    for codec, rate in rates.items():
        plain, given = _json(*words, "--codec", codec), _json(*words, "--codec", codec, "--intra", rate)
        assert plain["candidates"] == given["candidates"]
        assert f"between the ranks of a node: {rate} in each direction; --intra changes it" in plain["notes"]
        assert not any("between the ranks" in note for note in given["notes"])
    _probe(tmp_path / "p.json", device="NVIDIA H100 80GB HBM3")
    notes = _json(*words, "--probe", str(tmp_path / "p.json"))["notes"]
    assert any("node: 3.6tbit" in note for note in notes)


def test_a_codec_that_was_given_is_not_called_assumed() -> None:
    output = _run(*USUAL, "--link", "10gbit", "--codec", "a100")
    assert "codec a100: predicted" in output
    assert "assumed" not in output


def test_bytes_within_a_node_are_told_apart_from_those_between_nodes() -> None:
    words = [*USUAL, "--link", "1gbit", "--gpus-per-node", "4"]
    rows = {row["name"]: row for row in _json(*words)["candidates"]}
    levels, flat = rows["4 bit, hierarchical"], rows["4 bit"]
    assert levels["sent_bytes"] == levels["network_bytes"] + levels["node_bytes"]
    assert 0 < levels["network_bytes"] < flat["sent_bytes"] == flat["network_bytes"]
    assert "in node (MB)" in _run(*words)
    note = "Note: sent (MB): of one rank; wire (ms): of a node's link, which its 4 ranks share."
    assert note in _run(*words)
    (one, *_) = _json(*USUAL, "--nodes", "1", "--gpus-per-node", "4", "--link", "1gbit")["candidates"]
    assert (one["network_bytes"], one["node_bytes"]) == (0, one["sent_bytes"])
    assert "in node (MB)" not in _run(*USUAL, "--link", "1gbit")
    assert "which its" not in _run(*USUAL, "--link", "1gbit")


def test_json_has_the_break_even_and_both_sweeps() -> None:
    advised = _json(*USUAL, "--link", "1gbit")
    nodes = [row["nodes"] for row in advised["over_nodes"]]
    assert nodes == [count for count in advice.SWEEP_NODES if count > 1]
    at_four = next(row for row in advised["over_nodes"] if row["nodes"] == 4)["candidates"]
    assert at_four[0]["step_s"] == advised["candidates"][0]["step_s"]
    assert [row["factor"] for row in advised["over_rates"]] == list(advice.RATE_FACTORS)
    limit = advised["break_even"]
    assert limit["factor"] in advice.RATE_FACTORS
    assert limit["link_bit_per_s"] == pytest.approx(1e9 * limit["factor"])
    assert json.dumps(advised["over_rates"][0])


def test_probes_are_read_from_regular_files_only(tmp_path: Path) -> None:
    probe = _probe(tmp_path / "p.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "p.json")
    assert Probe.load(tmp_path / "link.json") == probe
