"""The command line."""

from __future__ import annotations

import importlib
import io
import json
import math
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import lightning_gqsgd
from lightning_gqsgd.cli import ranks, tables
from lightning_gqsgd.cli.app import app, main
from lightning_gqsgd.cli.facts import COLUMNS, facts_at
from lightning_gqsgd.cli.listing import LOCAL_STEPS
from lightning_gqsgd.codecs import CompandedCodec
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.local_steps.choosing import make_local
from lightning_gqsgd.presets import LOCAL_PRESETS, PRESETS
from lightning_gqsgd.research.systems import SYSTEMS
from tests.commands import output_of, refusal
from tests.processes import ended_well

_run = partial(output_of, "presets")


def _json(*arguments: str) -> Any:
    return json.loads(_run(*arguments, "--json"))


def test_numbers_of_measurements_have_no_exponent() -> None:
    values = (0.0355, 6.977, 99.96, 1507.2, 12_100.0, math.inf)
    assert [*map(tables.three_digits, values)] == ["0.0355", "6.98", "100", "1,507", "12,100", "inf"]


@pytest.mark.parametrize(("width", "left_out"), [(80, 3), (60, 5), (36, 6), (120, 0)])
def test_a_narrow_terminal_gets_whole_numbers_and_the_names_of_the_columns_that_are_left_out(
    width: int, left_out: int
) -> None:
    headings = ["gradients", *(f"quantity {number}" for number in range(7))]
    table = tables.plain_table("predicted", headings)
    table.add_row("4 bit, hierarchical", *(f"{10_000 + number}.0" for number in range(7)))
    written = io.StringIO()
    Console(file=written, width=width).print(table)
    lines = written.getvalue().splitlines()
    assert "…" not in written.getvalue()
    assert max(map(len, lines)) <= width
    (row,) = (line.split() for line in lines if "hierarchical" in line)
    assert row[3:] == [f"{10_000 + number}.0" for number in range(7 - left_out)]
    said = " ".join(written.getvalue().split())
    named = f"No room for {', '.join(headings[len(headings) - left_out :])}: a wider terminal shows more"
    assert (named in said) == (left_out > 0)


def test_the_table_has_every_preset_in_a_line_of_its_own_and_nothing_is_cut_off() -> None:
    output = _run()
    assert "…" not in output
    lines = output.splitlines()
    assert lines[0] == "Presets at n = 8"
    assert [heading for heading in COLUMNS if heading not in lines[2]] == []
    rows = {line.split()[0]: line for line in lines[4 : 4 + len(PRESETS)]}
    assert list(rows) == list(PRESETS)
    assert all(PRESETS[name].paper in row for name, row in rows.items())
    assert all(line == line.rstrip() for line in lines)


def test_systems_that_are_more_than_a_preset_have_tables_of_their_own() -> None:
    lines = _run().splitlines()
    for title, names in (("Local steps", LOCAL_PRESETS), ("Optimizers, rules of training, topologies", SYSTEMS)):
        words = [line.split(maxsplit=1)[:1] for line in lines[lines.index(title) + 4 :]]
        assert [word for (word,) in filter(None, words) if word in names] == [*names]
    assert [entry["name"] for entry in _json()] == [*PRESETS, *LOCAL_PRESETS, *SYSTEMS]


#: The systems of the literature that the package is made to have, and under which names.
LITERATURE = {
    "QSGD": ["qsgd", "qsgd_elias"],
    "TernGrad": ["terngrad"],
    "natural compression and dithering": ["natural_compression", "natural_dithering"],
    "ECQ-SGD": ["ecq_sgd"],
    "compressed AMSGrad": ["cd_adam", "comp_ams"],
    "Adagrad": ["adagrad"],
    "QCMD and QRDA Adagrad": ["qcmd_adagrad", "qrda_adagrad"],
    "censoring heavy ball": ["gqsgd_chb"],
    "FedPAQ": ["gqsgd_fedpaq"],
    "GenQSGD": ["gqsgd_genqsgd"],
    "predictive coding": ["gqsgd_predictive"],
    "Wyner-Ziv coding": ["wyner_ziv"],
    "FastSGD": ["fastsgd"],
    "S2 Reducer": ["s2_reducer"],
    "democratic coding": ["dgd_def", "dq_psgd"],
    "FedVote": ["fedvote"],
    "Artemis": ["artemis", "diana", "dore"],
    "MCM": ["gqsgd_mcm"],
    "NEOLITHIC": ["gqsgd_neolithic"],
    "DPSVRG": ["dpsvrg"],
    "MuLoCo": ["gqsgd_muloco"],
    "DeMo": ["demo"],
    "lossless averages": ["lossless"],
    "PULSE": ["pulse"],
    "Dion": ["dion"],
}


def test_every_system_of_the_literature_is_listed() -> None:
    listed = {entry["name"] for entry in _json()}
    for system, names in LITERATURE.items():
        assert {*names} <= listed, system


def test_an_average_of_several_messages_sends_that_many() -> None:
    column = LOCAL_STEPS.headings.index("an average sends")
    sent = {name: LOCAL_STEPS.row(name)[column] for name in LOCAL_PRESETS}
    several = {name: text for name, text in sent.items() if " messages of " in text}
    assert list(several) == ["gqsgd_neolithic"]
    assert several["gqsgd_neolithic"].startswith("4 messages of 2.4 bits (")


@pytest.mark.parametrize("name", LOCAL_PRESETS)
def test_a_system_of_local_steps_in_full(name: str) -> None:
    entry = _json(name)
    options, config = make_local(name, {}, {})
    assert (entry["local_steps"]["every"], entry["config"]) == (options.every, config.describe())
    assert entry["what"] in " ".join(_run(name).split())


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_says_where_it_lives_and_its_configuration_works(name: str) -> None:
    entry = _json(name)
    module, _, attribute = entry["home"].rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)
    assert resolve(SYSTEMS[name].config, 8).bits == SYSTEMS[name].config.bits
    assert entry["guarantees"] in " ".join(_run(name).split())


def test_no_warning_reaches_the_output() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = CliRunner().invoke(app, ["presets", "--block-size", "1024"])
    assert result.exit_code == 0, result.output
    assert "Warning" not in result.output
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("name", "bits", "ratio", "collective", "state", "bias", "omega", "delta"),
    [
        ("gqsgd", 8.125, 8.125 / 32, "two_shot", 0, "unbiased", CompandedCodec(8).omega(128), None),
        ("gqsgd_sum", 8.125, 8.125 / 32, "sum", 0, "unbiased", 8 * 256 * (2 / 31) ** 2 / 12, None),
        ("gqsgd_exponential_tree", 8.125, 8.125 / 32, "tree", 0, "unbiased", 0.125, None),
        ("qsgd", 4.03125, 4.03125 * 8 / 64, "gather", 0, "unbiased", 512 / (4 * 7**2), None),
        ("terngrad", 2.1875, 0.26171875, "gather", 0, "clipped", None, None),
        ("diana", 2.0625, 2.0625 * 8 / 64, "gather", 2, "unbiased", 16, None),
        ("dore", 2.0625, 2.0625 / 32, "two_shot", 1 + 2 / 8, "unbiased", 16, None),
        ("cd_adam", 1.0625, 1.0625 / 32, "two_shot", 2 + 1 / 8, "biased, memory corrects", None, 1 / 256),
        ("drive", 1 + 1 / 256, (1 + 1 / 256) * 8 / 64, "gather", 0, "unbiased over rotations", math.pi / 2 - 1, None),
        ("eden", 2 + 1 / 256, (2 + 1 / 256) * 8 / 64, "gather", 0, "unbiased over rotations", 0.1331212, None),
        ("topk_ef", 0.5, 0.5 * 8 / 64, "gather", 1, "biased, memory corrects", None, 41 / 4096),
    ],
)
def test_what_a_preset_is_at_eight_ranks(
    name: str,
    bits: float,
    ratio: float,
    collective: str,
    state: float,
    bias: str,
    omega: float | None,
    delta: float | None,
) -> None:
    found = _json(name)
    assert found["name"] == name
    assert found["wire_bits"] == pytest.approx(bits, rel=1e-3)
    assert found["sent_vs_fp32_ring"] == pytest.approx(ratio, rel=1e-3)
    assert (found["collective"], found["bias"]) == (collective, bias)
    assert found["state_per_coordinate"] == pytest.approx(state)
    assert found["omega"] == (None if omega is None else pytest.approx(omega))
    assert found["delta"] == (None if delta is None else pytest.approx(delta))


def test_elias_codes_are_measured() -> None:
    found = _json("qsgd_elias")
    assert 1 < found["wire_bits"] < 2
    assert found["sent_vs_fp32_ring"] == pytest.approx(found["wire_bits"] * 8 / 64, rel=1e-3)


def test_ranks_change_the_collective() -> None:
    assert [_json("gqsgd", "--ranks", ranks)["collective"] for ranks in ("2", "3")] == ["gather", "two_shot"]


def test_a_preset_that_cannot_sum_so_many_ranks_says_so_in_its_row() -> None:
    output = _run("--ranks", "300")
    row = next(line for line in output.splitlines() if line.split()[:1] == ["gqsgd_sum"])
    assert "not at n = 300" in row
    assert "gqsgd_sum: not at n = 300: reducer='sum' at bits=8 with subtractive dither sums at most" in output
    one = _json("gqsgd_sum", "--ranks", "300")
    assert one["works"] is False
    assert "at most 255 ranks" in one["problem"]
    assert one["wire_bits"] is None


def test_a_block_size_that_does_not_fit_one_preset() -> None:
    found = {one["name"]: one for one in _json("--block-size", "120")}
    assert [name for name, one in found.items() if not one.get("works", True)] == [
        "gqsgd_2bit",
        "gqsgd_trellis",
        "dq_psgd",
        "drive",
        "eden",
    ]
    assert found["gqsgd"]["block_size"] == 120
    assert found["gqsgd"]["wire_bits"] > 8 + 16 / 120


def test_one_preset_in_full() -> None:
    output = _run("diana")
    for words in (PRESETS["diana"].paper, PRESETS["diana"].what, "up_reference 1, up_mean 1", "ω = 16", "norm"):
        assert words in output
    assert ["levels", "1", "*"] in [line.split() for line in output.splitlines()]


def test_warnings_are_facts_of_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    unstable = {**PRESETS["ecq_sgd"].fields, "memory": "ef"}
    monkeypatch.setitem(PRESETS, "unstable", type(PRESETS["ecq_sgd"])(unstable, "none", "plain feedback"))
    assert facts_at("unstable", 8).warnings[0].startswith("memory with alpha=1, beta=1 may diverge")
    assert "warning" in _run("unstable")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gqsgd4bit"], "unknown preset 'gqsgd4bit'; did you mean 'gqsgd_4bit'"),
        (["GQSGD_4bit"], "unknown preset 'GQSGD_4bit'; did you mean 'gqsgd_4bit'"),
        (["?"], "unknown preset '?' (presets: gqsgd, "),
        (["?"], "topk_ef, gqsgd_diloco, "),
        (["?"], "gqsgd_predictive, adagrad, "),
        (["--block-size", "100"], "block_size=100 is not a multiple of 8"),
        (["gqsgd_diloco", "--block-size", "128"], "--block-size 128 has no effect on gqsgd_diloco; leave it out"),
        (["--ranks", "1"], "--ranks=1 is out of range: 2 to 4096"),
        (["--ranks", "1000000000000000"], "--ranks=1000000000000000 is out of range: 2 to 4096"),
    ],
)
def test_what_cannot_work_exits_with_2(arguments: list[str], words: str) -> None:
    assert words in refusal("presets", *arguments)


@pytest.mark.parametrize("arguments", [["advise"], ["presets", "foo"], ["presets", "--ranks", "1"]], ids=" ".join)
def test_missing_options_and_unknown_names_need_no_torch(arguments: list[str]) -> None:
    program = (
        "import sys; from lightning_gqsgd.cli.app import main\n"
        "sys.argv[1:] = " + repr(arguments) + "\n"
        "try:\n    main()\n"
        "except SystemExit as stopped:\n    print(stopped.code, 'torch' in sys.modules)\n"
    )
    assert ended_well("-c", program).stdout == "2 False\n"


@pytest.mark.parametrize("group", [[], ["systems"]], ids=["all", "systems"])
def test_the_list_of_commands_cuts_no_sentence_off(group: list[str]) -> None:
    result = CliRunner().invoke(app, [*group, "--help"], terminal_width=80)
    _, _, commands = result.stdout.partition("Commands:")
    assert commands
    assert all(line.endswith(".") and not line.endswith("...") for line in commands.splitlines() if line)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", ["bench", "probe"])
def test_an_interrupt_is_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gqsgd", command])
    monkeypatch.setattr(ranks, "run_ranks", _interrupt)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "gqsgd: interrupted\n"


@pytest.mark.parametrize(
    ("command", "name", "said", "words"),
    [
        *[
            (command, "RANK", "two", "not a number; start the ranks with torchrun, srun")
            for command in ("bench", "probe")
        ],
        ("bench", "WORLD_SIZE", "2.0", "not a number; start the ranks with torchrun, srun"),
        ("probe", "LOCAL_RANK", "-1", "not a number; start the ranks with torchrun, srun"),
        ("probe", "LOCAL_WORLD_SIZE", "two", "not a number of processes of this node; correct or unset it"),
        ("probe", "LOCAL_WORLD_SIZE", "0", "not a number of processes of this node; correct or unset it"),
    ],
)
def test_what_is_no_number_of_a_launcher_is_one_line(
    command: str, name: str, said: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable, value in {"RANK": "0", "WORLD_SIZE": "2", name: said}.items():
        monkeypatch.setenv(variable, value)
    result = CliRunner().invoke(app, [command])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"gqsgd: {name}={said!r} is {words}")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_module_is_the_command() -> None:
    done = ended_well("-m", "lightning_gqsgd.cli", "presets", "gqsgd_sum", "--json")
    assert json.loads(done.stdout)["name"] == "gqsgd_sum"


def test_version_and_help_need_no_torch() -> None:
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from lightning_gqsgd.cli.app import app\n"
        "for words in (['--version'], ['--help'], ['advise', '--help']):\n"
        "    result = CliRunner().invoke(app, words)\n"
        "    assert result.exit_code == 0, result.output\n"
        "    print(result.stdout.splitlines()[0])\n"
        "print([name for name in ('torch', 'numpy', 'numba') if name in sys.modules])\n"
    )
    lines = ended_well("-c", program).stdout.splitlines()
    assert lines[0] == f"gqsgd {lightning_gqsgd.__version__}"
    assert lines[-1] == "[]"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's device that is always full")
def test_a_standard_output_that_is_full_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "lightning_gqsgd.cli", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "gqsgd: standard output cannot be written (No space left on device); print to another place\n"
    )


def test_what_a_locale_does_not_have_is_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "latin-1", write_through=True))
    for words in (["presets", "gqsgd"], ["presets", "gqsgd", "--json"]):
        monkeypatch.setattr(sys, "argv", ["gqsgd", *words])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0
    text, _, values = printed.getvalue().decode("latin-1").partition("{")
    assert "? = " in text
    assert json.loads("{" + values)["name"] == "gqsgd"


def test_a_standard_output_that_is_closed_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it after `>&-`
    monkeypatch.setattr(sys, "argv", ["gqsgd", "presets"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
