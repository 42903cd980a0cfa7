"""Click logs, their features, the network and the experiment."""

from __future__ import annotations

import copy
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics.functional.classification import binary_auroc

from recipes.data import criteo
from recipes.data.click_features import NUMBER_CLASSES, field_ids, mixed, number_classes
from recipes.data.click_lines import MISSING
from recipes.data.clicks import FALLBACK, ClickData, ClickSet
from recipes.data.criteo import ClickLog, load_log
from recipes.data.splits import split
from recipes.data.synthetic_clicks import TRUE_AUC, synthetic_clicks
from recipes.errors import RecipeError
from recipes.measuring.metrics import AUC
from recipes.models.deepfwfm import DeepFwFM
from recipes.strategies.baselines import BaselineDDPStrategy
from recipes.tasks.adam_of_tables import AdamOfTables
from recipes.training.building import build_strategy
from recipes.training.train import train
from tests.distributed import ranks
from tests.recipes.conftest import run_script

Compose = Callable[..., DictConfig]

#: The experiment at toy size.
TOY = (
    "+exp=deeplight_criteo",
    "data.train_samples=1024",
    "data.test_samples=2048",
    "data.buckets=200",
    "data.batch_size=64",
    "model.hidden=[16]",
    "model.dimension=4",
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1",
    "threads=1",
)


@pytest.fixture
def log() -> ClickLog:
    """50 rows, 10 of them clicks, with negative, large and missing numbers."""
    rng = np.random.default_rng(0)
    numerical = rng.integers(-3, 1000, (50, 13)).astype(np.int32)
    numerical[rng.random(numerical.shape) < 0.2] = MISSING
    numerical[0, :2] = 2**31 - 1, -(2**31) + 1
    categorical = rng.integers(0, 2**32, (50, 26), dtype=np.uint32)
    categorical[rng.random(categorical.shape) < 0.2] = 0
    return ClickLog(categorical, numerical, (np.arange(50) % 5 == 0).astype(np.int8))


def _text(log: ClickLog) -> bytes:
    lines = [
        "\t".join(
            [
                str(label),
                *("" if number == MISSING else str(number) for number in numbers),
                *(f"{value:08x}" if value else "" for value in values),
            ]
        )
        for label, numbers, values in zip(log.labels, log.numerical, log.categorical, strict=True)
    ]
    return ("\n".join(lines) + "\n").encode()


def _data(tmp_path: Path, **settings: Any) -> ClickData:
    defaults: dict[str, Any] = {
        "name": "criteo",
        "batch_size": 4,
        "buckets": 1000,
        "cache_dir": str(tmp_path / "cache"),
    }
    return ClickData(**{**defaults, **settings})


def _ready(data: ClickData) -> ClickSet:
    data.prepare_data()
    data.setup()
    return data.splits


def _same(one: ClickLog, other: ClickLog) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in vars(one))


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train.txt", "train.tsv", "train.txt.gz", "log.npz"])
def test_all_formats_give_the_same_log(log: ClickLog, tmp_path: Path, name: str) -> None:
    file = tmp_path / "logs" / name
    file.parent.mkdir()
    if name.endswith(".npz"):
        np.savez(file, categorical=log.categorical, numerical=log.numerical, label=log.labels)
    else:
        file.write_bytes(gzip.compress(_text(log)) if name.endswith(".gz") else _text(log))
    assert _same(load_log(file, tmp_path / "cache", None), log)
    assert len(load_log(file, tmp_path / "cache", 7).labels) == 7
    data = _data(tmp_path, root=str(file.parent))
    in_folder = _ready(data)
    by_name = _ready(_data(tmp_path, root=str(file)))
    assert data.data_name == "criteo"
    assert np.array_equal(in_folder.train_ids, by_name.train_ids)


def test_text_is_parsed_once_until_it_changes(log: ClickLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, parsed, parse = tmp_path / "train.txt", [], criteo.parse
    file.write_bytes(_text(log).replace(b"\n", b"\r\n"))
    monkeypatch.setattr(criteo, "parse", lambda *given: parsed.append(given) or parse(*given))
    assert _same(load_log(file, tmp_path / "cache", None), load_log(file, tmp_path / "cache", None))
    assert len(parsed) == 1
    os.utime(file, (1, 1))
    assert _same(load_log(file, tmp_path / "cache", None), log)
    assert len(parsed) == 2
    for cached in (tmp_path / "cache").iterdir():
        cached.write_bytes(cached.read_bytes()[:100])
    with pytest.raises(RecipeError, match=r"train-\w+\.npz cannot be read .*delete it"):
        load_log(file, tmp_path / "cache", None)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"\n0\t", b"\n2\t", r"line 2: column 1 is '2', not the label, 0 or 1"),
        (b"\n0\t", b"\n0\t1.5\t", r"line 2: 41 columns instead of 40"),
        (b"\n0\t", b"\n", r"line 2: 39 columns .*Criteo's test file has no labels"),
        (b"\n0\t", b"\n0\t\t12x\t", r"line 2: 42 columns"),
        (b"2147483647", b"9999999999", r"line 1: a number does not fit 32 bits"),
        (b"2147483647", b"1.5", r"line 1: column 2 is '1\.5', not an integer"),
        (b"2147483647", b"-", r"line 1: column 2 is '-', not an integer"),
    ],
)
def test_broken_line_is_named(log: ClickLog, tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    file = tmp_path / "train.txt"
    file.write_bytes(_text(log).replace(old, new, 1))
    with pytest.raises(RecipeError, match=rf"train\.txt, {message}"):
        load_log(file, tmp_path / "cache", None)
    assert not (tmp_path / "cache").exists()


def test_broken_hexadecimal_number_is_named(log: ClickLog, tmp_path: Path) -> None:
    for text in (b"0x1f", b"123456789", b"1_0", b" 1"):
        lines = _text(log).split(b"\n")
        lines[3] = lines[3].rsplit(b"\t", 1)[0] + b"\t" + text
        (tmp_path / "train.txt").write_bytes(b"\n".join(lines))
        with pytest.raises(RecipeError, match=r"line 4: column 40 is .*, not a hexadecimal number; expected"):
            load_log(tmp_path / "train.txt", tmp_path / "cache", None)


def test_damaged_files_are_refused(log: ClickLog, tmp_path: Path) -> None:
    packed = gzip.compress(_text(log))
    for name, contents, message in (
        ("cut.txt.gz", packed[:-200], "is the download complete"),
        ("text.txt.gz", _text(log), "is the download complete"),
        ("none.txt", b"", "has no lines"),
        ("text.npz", _text(log), "cannot be read"),
        ("empty.npz", b"", "cannot be read"),
    ):
        (tmp_path / name).write_bytes(contents)
        with pytest.raises(RecipeError, match=rf"{name}.*{message}"):
            load_log(tmp_path / name, tmp_path / "cache", None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": None}, "label.* expected"),
        ({"label": np.int8(1)}, "no rows in label"),
        ({"label": np.full(50, 2, np.int8)}, r"label\[0\] is 2, must be 0 or 1"),
        ({"label": np.zeros(50)}, r"label is float64 \(50,\), not int8"),
        ({"numerical": np.zeros((50, 12), np.int32)}, r"numerical is int32 \(50, 12\), not int32 \(50, 13\)"),
        ({"categorical": np.zeros((50, 26), np.int64)}, r"categorical is int64 .*, not int32 or uint32 \(50, 26\)"),
        ({"categorical": np.full((50, 26), -7, np.int32)}, r"categorical\[0, 0\] is -7, must be 0 or more"),
        ({"label": np.array([{}] * 50)}, "cannot be read"),  # pickled: never loaded
    ],
)
def test_other_arrays_are_refused(log: ClickLog, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    arrays = {"categorical": log.categorical, "numerical": log.numerical, "label": log.labels, **changes}
    np.savez(tmp_path / "log.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(RecipeError, match=rf"log\.npz.*{message}"):
        load_log(tmp_path / "log.npz", tmp_path / "cache", None)


@pytest.mark.parametrize("name", ["absent", "empty", "file.zip", "several"])
def test_a_root_that_is_no_log_is_an_error_whatever_fallback_says(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.zip").write_bytes(b"")
    (tmp_path / "several").mkdir()
    for one in ("train.txt", "test.txt"):
        (tmp_path / "several" / one).write_bytes(b"")
    with pytest.raises(RecipeError, match=r"data\.root=.*name it with data\.root=PATH"):
        _data(tmp_path, root=str(tmp_path / name), fallback=True).prepare_data()


@pytest.mark.parametrize(
    "wrong", [{"fields": 40}, {"buckets": 0}, {"max_rows": 0}, {"batch_size": 0}, {"test_fraction": 1.0}]
)
def test_impossible_settings_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(RecipeError, match=rf"data\.{name}="):
        _ready(_data(tmp_path, **wrong))


# --- features --------------------------------------------------------------------------------------------------------


def test_numbers_are_sorted_into_classes() -> None:
    def of(*numbers: int) -> list[int]:
        return number_classes(np.array(numbers, dtype=np.int32)).tolist()

    assert of(MISSING, -2, -1, 0, 1, 2, 3) == [0, 1, 2, 3, 4, 5, 6]
    assert of(20) == [5 + 8]  # ln(20)^2 = 8.97
    assert of(-20) == [466 + 8]
    assert of(2**31 - 1, -(2**31) + 1) == [466, NUMBER_CLASSES - 1]
    positive = number_classes(np.arange(-2, 100_000, dtype=np.int32))
    assert (np.diff(positive) >= 0).all()


def test_hashes_are_splitmix64s() -> None:
    # First outputs of the published generator with seeds 0 and 1.
    assert [hex(value) for value in mixed(np.array([0, 1], dtype=np.uint64))] == [
        "0xe220a8397b1dcdaf",
        "0x910a2dec89025cc1",
    ]


def test_hashed_ids_are_uniform_and_apart_in_other_fields() -> None:
    values = np.arange(20_000, dtype=np.uint32)  # neighbours, as frequency-sorted ids are
    log = ClickLog(np.repeat(values[:, None], 26, 1), np.zeros((len(values), 13), np.int32), values.astype(np.int8))
    ids = field_ids(log, 100)
    assert ids.shape == (20_000, 39)
    assert ids.min() == 0
    assert ids.max() == 99
    assert np.array_equal(ids, field_ids(log, 100))
    for field in range(13, 39):
        counts = np.bincount(ids[:, field], minlength=100)
        assert 60 < ((counts - 200) ** 2 / 200).sum() < 150  # chi-squared with 99 degrees of freedom
    # Values that share a bucket in one field share one in another as often as any do: in 1 % of cases.
    pairs = ids[:, 13][:, None] == ids[:1000, 13]
    together = (ids[:, 14][:, None] == ids[:1000, 14])[pairs].mean()
    assert 0.012 < together < 0.018  # 1 % and the 1,000 values that meet themselves, 0.5 %


def test_split_is_stratified_and_the_same_everywhere(log: ClickLog, tmp_path: Path) -> None:
    rows, test_rows = split(log.labels, 0.2)
    assert sorted([*rows, *test_rows]) == list(range(50))
    assert (log.labels[rows].sum(), log.labels[test_rows].sum()) == (8, 2)
    assert test_rows.tolist() == split(log.labels, 0.2)[1].tolist()
    np.savez(tmp_path / "log.npz", categorical=log.categorical, numerical=log.numerical, label=log.labels)
    clicks = _ready(_data(tmp_path, root=str(tmp_path / "log.npz")))
    assert np.array_equal(clicks.test_ids, field_ids(log, 1000)[test_rows])
    assert np.array_equal(clicks.train_labels, log.labels[rows])
    some = _ready(_data(tmp_path, root=str(tmp_path / "log.npz"), train_samples=20, test_samples=5))
    assert (some.train_labels.sum(), some.test_labels.sum()) == (4, 1)
    with pytest.raises(RecipeError, match=r"0 of 2 test samples are clicks.*data\.test_samples"):
        _ready(_data(tmp_path, root=str(tmp_path / "log.npz"), test_samples=2))


def test_batches(tmp_path: Path) -> None:
    data = _data(tmp_path, batch_size=64)
    _ready(data)
    ids, labels = next(iter(data.train_dataloader()))
    assert (ids.shape, ids.dtype) == ((64, 39), torch.int64)
    assert (labels.shape, labels.dtype) == ((64,), torch.float32)
    data.batch_size = 10**6
    with pytest.raises(RecipeError, match=r"cannot fill one step"):
        data.train_dataloader()


# --- drawn clicks ----------------------------------------------------------------------------------------------------


def test_drawn_clicks_are_fixed_and_their_best_auc_is_known() -> None:
    log, probabilities = synthetic_clicks()
    again, _ = synthetic_clicks()
    assert _same(log, again)
    assert 0.15 < log.labels.mean() < 0.3
    best = binary_auroc(torch.from_numpy(probabilities), torch.from_numpy(log.labels).int())
    assert float(best) == pytest.approx(TRUE_AUC, abs=5e-4)
    counts = np.sort(np.bincount(log.categorical[:, -1]))[::-1]
    assert counts[0] == pytest.approx(10 * counts[9], rel=0.3)  # Zipf


def test_fallback_says_so_and_its_absence_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _data(tmp_path)
    _ready(data)
    assert data.data_name == FALLBACK
    message = capsys.readouterr().err
    assert "Criteo is not here: data.root is not set" in message
    assert FALLBACK in message
    assert "data.root=PATH" in message
    for step in ("prepare_data", "setup"):
        with pytest.raises(RecipeError, match=r"there is no Criteo: .*data\.root=PATH"):
            getattr(_data(tmp_path, fallback=False), step)()


@pytest.mark.usefixtures("clean_process")
@pytest.mark.slow
def test_training_on_drawn_clicks_learns(composed: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ("data.buckets=1000", "data.batch_size=1024", "model.hidden=[32]", "optimizer.lr=0.01")
    cfg = composed("+exp=deeplight_criteo", *size, "trainer.max_epochs=2", "trainer.devices=1", "threads=1")
    auc = train(cfg, tmp_path)
    assert 0.65 < auc < TRUE_AUC
    facts = json.loads((tmp_path / "result.json").read_text())
    assert (facts["metric"], facts["data"], facts["train_samples"]) == ("auc", FALLBACK, 16_384)
    assert facts["metrics"][AUC.test] == pytest.approx(auc)
    assert FALLBACK in (tmp_path / "hparams.yaml").read_text()
    assert f"deeplight_criteo on {FALLBACK}" in capsys.readouterr().out
    assert (tmp_path / "auc.png").stat().st_size > 10_000


# --- network ---------------------------------------------------------------------------------------------------------


def test_interactions_are_the_sum_over_pairs_of_fields() -> None:
    torch.manual_seed(0)
    network = DeepFwFM(fields=5, buckets=7, dimension=3, hidden=[4]).double()
    nn.init.normal_(network.pairs)
    embedded = torch.randn(6, 5, 3, dtype=torch.float64)
    weights = (network.pairs + network.pairs.T) / 2
    expected = torch.zeros(6, dtype=torch.float64)
    for f in range(5):
        for g in range(f + 1, 5):
            expected += weights[f, g] * (embedded[:, f] * embedded[:, g]).sum(1)
    torch.testing.assert_close(network.interactions(embedded), expected)


def test_fields_have_rows_of_their_own_and_the_logit_has_three_parts() -> None:
    torch.manual_seed(0)
    network = DeepFwFM(fields=3, buckets=5, dimension=2, hidden=[4, 4])
    nn.init.normal_(network.weights.weight)
    ids = torch.tensor([[0, 4, 2], [1, 1, 1]])
    rows = torch.tensor([[0, 9, 12], [1, 6, 11]])
    embedded = network.embeddings.weight[rows]
    expected = network.weights.weight[rows, 0].sum(1) + network.interactions(embedded)
    expected = expected + network.deep(embedded.reshape(2, 6))[:, 0]
    torch.testing.assert_close(network(ids), expected)
    network(ids).sum().backward()
    assert network.embeddings.weight.grad.abs().sum(1).nonzero()[:, 0].tolist() == sorted(rows.flatten().tolist())  # type: ignore[union-attr]


def test_most_parameters_are_embeddings(composed: Compose) -> None:
    cfg = composed("+exp=deeplight_criteo")
    with torch.device("meta"):
        network = DeepFwFM(**{name: value for name, value in cfg.model.items() if name not in ("_target_", "name")})
    assert sum(p.numel() for p in network.parameters()) == 4_769_122
    assert network.embeddings.weight.numel() + network.weights.weight.numel() == 4_290_000
    with pytest.raises(ValueError, match=r"model\.hidden: 0 must be at least 1"):
        DeepFwFM(3, 5, 2, hidden=[])


# --- sparse gradients ------------------------------------------------------------------------------------------------


def _sparse_and_dense(rank: int) -> None:
    """Both give the same weights, and a rank counts what it sends alone."""
    weights = []
    for sparse in (True, False):
        torch.manual_seed(0)
        network = DeepFwFM(fields=2, buckets=10, dimension=3, hidden=[4], sparse=sparse)
        strategy: Any = SimpleNamespace(_hook="none", _sparse_bytes={})
        tables = BaselineDDPStrategy._count_sparse(strategy, network)
        model = DistributedDataParallel(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        for step in range(3):
            optimizer.zero_grad()
            # Rank 0 touches two rows, rank 1 three others.
            ids = [[0, 0], [0, 0]] if rank == 0 else [[1 + step, 1], [2 + step, 1]]
            model(torch.tensor(ids)).sum().backward()
            optimizer.step()
        rows = 2 + rank
        if sparse:
            assert tables == {"embeddings.weight", "weights.weight"}
            assert strategy._sparse_bytes == {"embeddings": rows * (8 + 3 * 4), "weights": rows * (8 + 4)}
            assert network.embeddings.weight.grad.coalesce().indices().numel() == 5  # type: ignore[union-attr]
        else:
            assert tables == set()
            assert strategy._sparse_bytes == {}
        weights.append(network.embeddings.weight.detach().clone())
    torch.testing.assert_close(*weights)


@pytest.mark.slow
def test_sparse_gradients_are_exchanged_and_counted(tmp_path: Path) -> None:
    ranks.run(_sparse_and_dense, 2, tmp_path)


@pytest.mark.usefixtures("clean_process")
def test_sparse_gradients_need_an_optimizer_without_decay(composed: Compose, tmp_path: Path) -> None:
    cfg = (*TOY, "trainer.devices=1", "model.sparse=true", "test=false")
    with pytest.raises(RecipeError, match=r"optimizer\.name=adamw .* set model\.sparse=false, or optimizer\.name=adam"):
        train(composed(*cfg, "optimizer.name=adamw"), tmp_path / "adamw")
    with pytest.raises(RecipeError, match=r"weight_decay=0\.1 cannot take"):
        train(composed(*cfg, "optimizer.name=sgd", "optimizer.weight_decay=0.1"), tmp_path / "decayed")
    auc = train(composed(*cfg, "strategy=gqsgd_4bit"), tmp_path / "adam")
    assert 0 < auc < 1


def test_a_preset_gathers_the_rows_of_tables_unless_it_says_otherwise() -> None:
    def built(network: nn.Module, target: str = "lightning_gqsgd.GQSGDStrategy", **entries: object) -> Any:
        return build_strategy(OmegaConf.create({"_target_": target, **entries}), network)

    tables, dense = (DeepFwFM(2, 10, 3, hidden=[4], sparse=sparse) for sparse in (True, False))
    assert built(tables).gqsgd_config.sparse == "gather"
    assert built(dense).gqsgd_config.sparse == "refuse"
    assert built(tables, sparse="logarithmic").gqsgd_config.sparse == "logarithmic"
    assert built(tables, local_steps=8).gqsgd_config.sparse == "refuse"
    assert "sparse" not in built(tables, "recipes.strategies.baselines.BaselineDDPStrategy")._ddp_kwargs


def test_adam_of_tables_is_adam_and_sparse_adam_and_goes_on_from_a_checkpoint() -> None:
    def step(network: torch.nn.Module, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
        ids = torch.randint(0, 10, (4, 2), generator=torch.Generator().manual_seed(seed))
        for optimizer in optimizers:
            optimizer.zero_grad()
        network(ids).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    torch.manual_seed(0)
    mine = DeepFwFM(2, 10, 3, hidden=[4], sparse=True)
    expected, resumed = copy.deepcopy(mine), copy.deepcopy(mine)
    tables = [mine.embeddings.weight, mine.weights.weight]
    optimizer = AdamOfTables(mine.parameters(), tables, lr=0.01)
    others = {expected.embeddings.weight, expected.weights.weight}
    pair = [
        torch.optim.SparseAdam(list(others), lr=0.01),
        torch.optim.Adam([p for p in expected.parameters() if p not in others], lr=0.01),
    ]
    for seed in range(3):
        step(mine, [optimizer], seed)
        step(expected, pair, seed)
    resumed.load_state_dict(mine.state_dict())
    again = AdamOfTables(resumed.parameters(), [resumed.embeddings.weight, resumed.weights.weight], lr=1.0)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(3, 5):
        step(mine, [optimizer], seed)
        step(expected, pair, seed)
        step(resumed, [again], seed)
    for one, other, third in zip(mine.parameters(), expected.parameters(), resumed.parameters(), strict=True):
        # Adam divides by gradients that may be tiny, so roundings grow; five steps move a weight by up to 0.05.
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
        assert torch.equal(one, third)


# --- two processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_with_gqsgd(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    finished = run_script("run.py", *TOY, "strategy=gqsgd_4bit", f"hydra.run.dir={folder}", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert f"named '{FALLBACK}' in this run" in finished.stderr
    assert f"deeplight_criteo on {FALLBACK}" in finished.stdout
    facts = json.loads((folder / "result.json").read_text())
    assert (facts["processes"], facts["steps"], facts["data"]) == (2, 8, FALLBACK)
    assert 0.3 < facts["metrics"][AUC.test] < 1
    assert 4 < facts["bits_per_coordinate"] < 6
    assert not {AUC.train} & set((folder / "metrics.csv").read_text().split("\n", 1)[0].split(","))


# --- the real thing --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("GQSGD_DATA"), reason="needs the real data: set GQSGD_DATA")
def test_two_processes_learn_from_real_clicks(tmp_path: Path) -> None:
    root = Path(os.environ["GQSGD_DATA"]) / "criteo_tiny"
    arguments = ("+exp=deeplight_criteo", f"data.root={root}", "data.buckets=1000", "model.hidden=[64]", "threads=1")
    finished = run_script("run.py", *arguments, f"hydra.run.dir={tmp_path}", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr[-3000:]
    facts = json.loads((tmp_path / "result.json").read_text())
    assert (facts["data"], facts["train_samples"], facts["processes"]) == ("criteo", 13_107, 2)
    assert facts["metrics"][AUC.test] > 0.58  # 84 clicks in the test split: a standard error of 0.03
