"""Sparse gradients of embeddings under the hook, on real processes."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.ddp.functional import all_reduce
from lightning_gqsgd.ddp.hook import GQSGDState, register_gqsgd
from tests.distributed.models import fingerprint
from tests.distributed.ranks import logged, on_ranks, run

ROWS = 60


class Tables(nn.Module):
    """Two tables, a frozen one, and a dense layer; the same on every rank."""

    def __init__(self, sparse: bool = True, width: int = 10, **bag: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(ROWS, width, sparse=sparse, padding_idx=0)
        self.bag = nn.EmbeddingBag(ROWS, 3, sparse=sparse, mode="mean", **bag)
        self.frozen = nn.Embedding(ROWS, 3, sparse=sparse)
        self.frozen.weight.requires_grad_(False)
        self.head = nn.Linear(width + 6, 1)

    def forward(self, x: Tensor, use_bag: bool = True) -> Tensor:
        bag = self.bag(x) if use_bag else torch.zeros(len(x), 3, dtype=self.head.weight.dtype)
        return self.head(torch.cat([self.words(x).tanh().sum(1), bag, self.frozen(x).sum(1)], dim=1)).square()


def _wrapped(module: nn.Module, ddp: dict[str, Any] | None = None, **fields: Any) -> tuple[Any, GQSGDState]:
    model = DistributedDataParallel(module, **(ddp or {}))
    return model, register_gqsgd(model, **{"sparse": "gather", "min_numel": 1, **fields})


def _ids(rank: int, step: int) -> Tensor:
    """Some rows, several of them twice, and the padding."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, ROWS // 3, (8, 4), generator=generator) * (torch.arange(8) > 0)[:, None]


def _optimizers(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    trained = [p for p in model.parameters() if p.requires_grad]
    if name != "sparse_adam":
        return [torch.optim.SGD(trained, lr=0.05) if name == "sgd" else torch.optim.Adagrad(trained, lr=0.05)]
    tables = [p for p in trained if p.shape[0] == ROWS]
    dense = [p for p in trained if p.shape[0] != ROWS]
    return [torch.optim.SparseAdam(tables, lr=0.01), torch.optim.SGD(dense, lr=0.05)]


def _train(model: nn.Module, rank: int, steps: range, name: str = "sgd", norm: float | None = None) -> None:
    optimizers = _optimizers(name, model)
    for step in steps:
        loss = model(_ids(rank, step)).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        if norm is not None:
            clip_grad_norm_(model.parameters(), norm)
        for optimizer in optimizers:
            optimizer.step()


def _gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of both tables, of which every rank must have the same."""
    module: Any = model.module
    return [module.words.weight.grad, module.bag.weight.grad]


def _check_that_ranks_agree(model: nn.Module) -> None:
    for gradient in _gradients(model):
        assert gradient.is_coalesced()
        ones = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(ones, torch.tensor([gradient._nnz()]))
        assert len({int(count) for count in ones}) == 1
        for part in (gradient.indices(), gradient.values().double().nan_to_num(7.0)):
            parts = [torch.empty_like(part) for _ in ones]
            dist.all_gather(parts, part.contiguous())
            assert all(torch.equal(other, part) for other in parts)


# --- training --------------------------------------------------------------------------------------------------------


def _trained(rank: int) -> list[str]:
    bits = []
    runs: list[tuple[str, dict[str, Any]]] = [
        ("sparse_adam", {}),
        ("adagrad", {"bits": 4}),
        ("sgd", {"sparse": "logarithmic", "bits": 5}),
        ("sgd", {"auto": True}),
        ("sgd", {"sparse": "sketch"}),
    ]
    for name, fields in runs:
        model, state = _wrapped(Tables(), **fields)
        before = fingerprint(model)
        _train(model, rank, range(5), name)
        assert fingerprint(model) != before
        bits.append(fingerprint(model))
        assert "of 3 tables, the touched rows only" in state.report()
        assert state.telemetry.totals()["bytes_sent"] > 0
        state.close()
    return bits


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parameters_are_bit_identical_on_all_ranks(ranks: int, tmp_path: Path) -> None:
    for bits in zip(*run(_trained, ranks, tmp_path), strict=True):
        assert len(set(bits)) == 1


def _check_that_copies_train_apart(model: DistributedDataParallel, rank: int) -> None:
    model.zero_grad()
    unpickled = pickle.loads(pickle.dumps(model))  # noqa: S301
    for other in (copy.deepcopy(model), unpickled):
        _train(other, rank, range(1))
        assert fingerprint(other) != fingerprint(model)
        assert all(parameter.grad is None for parameter in model.parameters())


def _all_options(rank: int) -> list[str]:
    bits = []
    options: list[dict[str, Any]] = [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 0.0001},
    ]
    for ddp in options:
        model, state = _wrapped(Tables(), ddp, bits=5)
        _train(model, rank, range(4))
        bits.append(fingerprint(model))
        if "find_unused_parameters" in ddp:
            _check_that_copies_train_apart(model, rank)
        state.close()
    for limit in (0.0, 1.0):
        model, state = _wrapped(Tables(), reducer="hierarchical", node_size=2, sparse_limit=limit)
        _train(model, rank, range(2))
        bits.append(fingerprint(model))
        state.close()
    return bits


@pytest.mark.slow
def test_results_do_not_depend_on_ddp_options_and_nodes_work(tmp_path: Path) -> None:
    for bits in zip(*run(_all_options, 4, tmp_path), strict=True):
        assert len(set(bits)) == 1
    first, *others = run(_all_options, 4, tmp_path)[0]
    assert others[:3] == [first] * 3


@pytest.mark.slow
@on_ranks(2)
def test_a_rank_without_inputs_joins_with_no_rows(rank: int) -> str:
    """Rank 1 has fewer inputs, and then takes part with no rows."""
    model, state = _wrapped(Tables())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    joins: Any = [model]
    with Join(joins):
        for step in range(3 - rank):
            optimizer.zero_grad()
            model(_ids(rank, step)).mean().backward()
            optimizer.step()
    state.close()
    return fingerprint(model)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks()
def test_native_rows_are_plain_ddp_to_rounding_and_a_dense_table_is_that_of_dense_gradients(
    rank: int, ranks: int
) -> None:
    """Plain DDP with dense gradients, and what has to give the same."""
    plain = DistributedDataParallel(Tables(sparse=False))
    _train(plain, rank, range(5), norm=0.5)
    alike: list[dict[str, Any]] = [
        {"reducer": "native"},
        {"warmup_steps": 5},
        {"reducer": "native", "sparse_limit": 0},
    ]
    for fields in alike:
        model, state = _wrapped(Tables(), **fields)
        _train(model, rank, range(5), norm=0.5)
        for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-7)
        state.close()

    # A table that is reduced whole has the bits that sparse=False has, in the rows that a rank has touched.
    reduced = []
    for sparse in (True, False):
        model, state = _wrapped(Tables(sparse), sparse_limit=0.0)
        model(_ids(rank, 0)).mean().backward()
        reduced.append([gradient.to_dense() for gradient in _gradients(model)])
        if sparse:
            _check_that_ranks_agree(model)
            touched = [gradient.indices()[0] for gradient in _gradients(model)]
        state.close()
    for mine, expected, rows in zip(*reduced, touched, strict=True):
        assert 0 < len(rows) < ROWS
        assert torch.equal(mine[rows], expected[rows])
        assert mine.count_nonzero(dim=1).count_nonzero() <= len(rows)


# --- what batches touch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks()
def test_all_rows_no_rows_one_row_and_no_table_at_all(rank: int, ranks: int) -> None:
    looks: dict[str, Any] = {"find_unused_parameters": True}
    model, state = _wrapped(Tables(), looks, sparse_limit=100)
    plain = DistributedDataParallel(Tables(sparse=False), **looks)

    def compare(x: Tensor, error: float = 0.02, **use: bool) -> list[Tensor]:
        for each in (model, plain):
            each(x, **use).mean().backward()
        _check_that_ranks_agree(model)
        found = _gradients(model)
        for mine, expected in zip(found, _gradients(plain), strict=True):
            reference = torch.zeros_like(mine.to_dense()) if expected is None else expected
            assert (mine.to_dense() - reference).norm() <= error * reference.norm()
        for each in (model, plain):
            each.zero_grad()
        return found

    everything = torch.arange(ROWS).view(-1, 4)
    words, bag = compare(everything)
    assert words._nnz() in (ROWS - 1, ROWS)  # torch leaves the padding out, or has a row of zeros
    assert bag._nnz() == ROWS
    compare(everything if rank == 0 else everything[:1])
    padding = torch.zeros(2, 4, dtype=torch.int64)
    words, _ = compare(padding)
    assert not words.to_dense().any()
    compare(padding if rank == 0 else everything)
    repeated = torch.full((5, 4), 7)
    words, bag = compare(repeated)
    assert words.indices().tolist() == [[7]]
    # The table is not in the batch of one rank, nor in that of any rank.
    _, bag = compare(_ids(rank, 3), use_bag=rank == 0)
    assert bag._nnz() > 0
    _, bag = compare(_ids(rank, 4), use_bag=False)
    assert bag._nnz() == 0
    state.close()


@on_ranks(2)
def test_accumulation_resuming_and_scaling(rank: int) -> None:
    # Gradients are accumulated: two batches of one step are one batch of twice the size.
    model, state = _wrapped(Tables(), reducer="native")
    whole, other = _wrapped(Tables(), reducer="native")
    with model.no_sync():
        model(_ids(rank, 0)).sum().backward()
    model(_ids(rank, 1)).sum().backward()
    whole(torch.cat([_ids(rank, 0), _ids(rank, 1)])).sum().backward()
    _check_that_ranks_agree(model)
    for mine, expected in zip(_gradients(model), _gradients(whole), strict=True):
        torch.testing.assert_close(mine.to_dense(), expected.to_dense())
    state.close()
    other.close()

    # A run that is interrupted goes on with the same bits.
    model, state = _wrapped(Tables(), bits=4)
    _train(model, rank, range(3))
    weights, saved = {k: v.clone() for k, v in model.module.state_dict().items()}, state.state_dict()
    _train(model, rank, range(3, 6))
    resumed, other = _wrapped(Tables(), bits=4)
    resumed.module.load_state_dict(weights)
    other.load_state_dict(saved)
    _train(resumed, rank, range(3, 6))
    assert fingerprint(resumed) == fingerprint(model)
    state.close()
    other.close()

    # NaN on one rank stays in its row and reaches all ranks, and a scaler skips the step everywhere.
    model, state = _wrapped(Tables())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    before = fingerprint(model)
    scaler.scale(model(_ids(rank, 0)).mean()).backward()
    _check_that_ranks_agree(model)
    optimizer.zero_grad()

    def spoil(gradient: Tensor) -> Tensor:
        values = gradient._values().clone()
        values[gradient._indices()[0] == 7] = torch.inf
        return torch.sparse_coo_tensor(gradient._indices(), values, gradient.shape, check_invariants=False)

    handle = model.module.words.weight.register_hook(spoil) if rank == 1 else None
    ids = torch.tensor([[7, 8, 9, 10], [1, 2, 3, 4]])
    scaler.scale(model(ids).mean()).backward()
    _check_that_ranks_agree(model)
    gradient = _gradients(model)[0]
    assert gradient.indices()[0][~gradient.values().isfinite().all(1)].tolist() == [7]
    scaler.step(optimizer)
    scaler.update()
    assert fingerprint(model) == before
    assert scaler.get_scale() == 1.0
    if handle is not None:
        handle.remove()
    optimizer.zero_grad()
    scaler.scale(model(ids).mean()).backward()
    scaler.step(optimizer)
    assert fingerprint(model) != before
    state.close()


@pytest.mark.slow
@on_ranks(2)
def test_tables_of_every_dtype(rank: int) -> None:
    for dtype, error in ((torch.bfloat16, 0.02), (torch.float16, 0.02), (torch.float64, 0.01)):
        model, state = _wrapped(Tables().to(dtype))
        plain = DistributedDataParallel(Tables(sparse=False).to(dtype))
        for each in (model, plain):
            each(_ids(rank, 0)).mean().backward()
        _check_that_ranks_agree(model)
        for mine, expected in zip(_gradients(model), _gradients(plain), strict=True):
            assert mine.dtype == dtype
            difference = (mine.to_dense().double() - expected.double()).norm()
            assert difference < error * expected.double().norm()
        state.close()


@on_ranks(2)
def test_a_static_graph_changes_no_bits(rank: int) -> None:
    """The gradients' bits in three steps, without a static graph and with one."""
    found = []
    for ddp in ({}, {"static_graph": True}):
        model, state = _wrapped(Tables(), ddp)
        gradients = []
        for step in range(3):
            model.zero_grad()
            model(_ids(rank, step)).mean().backward()
            _check_that_ranks_agree(model)
            gradients += [p.grad.to_dense().numpy().tobytes() for p in model.parameters() if p.grad is not None]
        assert state.step == 3
        state.close()
        found.append(gradients)
    without, static = found
    assert without == static


# --- what is said and refused ----------------------------------------------------------------------------------------


def _said_and_refused(rank: int) -> list[str]:
    lines = logged()
    model, state = _wrapped(Tables(max_norm=0.5), sparse_limit=0.3)
    for step in range(3):
        model(_ids(rank, step)).mean().backward()
        _check_that_ranks_agree(model)
    state.close()
    with pytest.raises(ConfigError, match=r"'words' gives sparse gradients; compress them with sparse='gather'"):
        register_gqsgd(DistributedDataParallel(Tables()))
    with pytest.raises(ConfigError, match=r"not for all_reduce.*leave sparse out"):
        all_reduce(torch.ones(3), sparse="gather")
    averaging = PostLocalSGDState(None, None, 2)
    with pytest.raises(ConfigError, match="post-local SGD averages dense gradients"):
        register_gqsgd(DistributedDataParallel(Tables()), sparse="gather", post_local_sgd=averaging)
    return lines


def test_the_fall_back_is_said_once_and_what_cannot_work_is_refused(tmp_path: Path) -> None:
    first, other = run(_said_and_refused, 2, tmp_path)
    dense = [text for text in first if "is reduced as a dense one" in text]
    assert len(dense) == 2  # one line for each table
    assert "sparse_limit=0.3" in dense[0]
    assert sum("'bag' has max_norm" in text for text in first) == 1
    assert not any("is reduced as a dense one" in text for text in other)


def _ignores_a_table(rank: int) -> float:
    """DDP is told to leave a table to its rank, as tables are that no rank holds as a whole."""
    module = Tables(sparse=False)
    module.words = nn.Embedding(ROWS, 10, sparse=True)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["words.weight"])
    model = DistributedDataParallel(module, find_unused_parameters=True)
    state = register_gqsgd(model, min_numel=1)
    assert "table" not in state.report()
    model(_ids(rank, 0)).mean().backward()
    state.close()
    assert module.words.weight.grad is not None
    return float(module.words.weight.grad.to_dense().norm())


def test_a_table_that_ddp_ignores_needs_no_option_and_keeps_its_gradient(tmp_path: Path) -> None:
    assert len(set(run(_ignores_a_table, 2, tmp_path))) == 2
