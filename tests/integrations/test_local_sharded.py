"""Local steps of replicas that FSDP2 has sharded, in loops of Lightning, Fabric and Accelerate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_gqsgd import LocalSteps
from tests.distributed.models import loss_of, mlp
from tests.distributed.ranks import logged, run
from tests.integrations.fsdp_models import mesh, needs_fsdp_hooks, sharded, weight_bits

pytestmark = [needs_fsdp_hooks, pytest.mark.slow]

MIXES = "saves all replicas under the same names"
STARTS = "starts from the anchor"


def local_steps(model: nn.Module, on: DeviceMesh) -> LocalSteps:
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    return LocalSteps(model, inner, every=3, bits=4, outer="sgd", group=on["replicate"].get_group())


def train(
    model: nn.Module, optimizer: Any, steps: range, backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
) -> None:
    """Make some steps on this rank's own data."""
    for step in steps:
        backward(loss_of(model, dist.get_rank(), step))
        optimizer.step()
        optimizer.zero_grad()


def in_a_plain_loop() -> str:
    """The bits of 8 steps in PyTorch."""
    on = mesh(2)
    model = sharded(on["shard"])
    optimizer = local_steps(model, on)
    train(model, optimizer, range(8))
    optimizer.finish()
    optimizer.close()
    return weight_bits(model)


def texts(records: list[str]) -> list[str]:
    """What was said of `MIXES` and `STARTS` since the last call."""
    found = [text for known in (MIXES, STARTS) for text in (known,) if any(known in record for record in records)]
    records.clear()
    return found


def _lightning(_: int, folder: Path) -> dict[str, Any]:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            self.on = mesh(2)
            self.net = sharded(self.on["shard"])

        def configure_optimizers(self) -> LocalSteps:
            return local_steps(self.net, self.on)

        def training_step(self, _: Any) -> torch.Tensor:
            return loss_of(self.net, self.global_rank, self.global_step)

        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.ckpt_path is None and self.global_step in (5, 6):
                self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/{self.global_step}.ckpt")

        def on_train_end(self) -> None:
            self.trainer.optimizers[0].finish()

    records = logged()

    def fit(in_shards: bool, ckpt_path: Path | None = None) -> tuple[str, list[str]]:
        strategy = ModelParallelStrategy(4, 1, save_distributed_checkpoint=in_shards)
        options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        options["default_root_dir"] = folder / str(in_shards)
        trainer = pl.Trainer(accelerator="cpu", devices=4, strategy=strategy, max_steps=8, **options)
        model = Module()
        trainer.fit(model, torch.utils.data.DataLoader(torch.zeros(64)), ckpt_path=ckpt_path)
        assert trainer.optimizers[0].averages.step == 8
        return weight_bits(model.net), texts(records)

    found: dict[str, Any] = {}
    for in_shards in (True, False):
        found[f"whole {in_shards}"] = fit(in_shards)
        for step in (5, 6):
            found[f"{step} {in_shards}"] = fit(in_shards, folder / str(in_shards) / f"{step}.ckpt")
    return {**found, "plain": (in_a_plain_loop(), [])}


def test_lightnings_trainer(tmp_path: Path) -> None:
    ranks = run(_lightning, 4, tmp_path, tmp_path, initialise=False)
    bits = {name: {one[name][0] for one in ranks} for name in ranks[0]}
    assert all(len(one) == 1 for one in bits.values())
    assert bits["whole True"] == bits["whole False"] == bits["plain"]
    said = {name: [one[name][1] for one in ranks] for name in ranks[0]}
    assert said["whole True"] == said["whole False"] == [[MIXES], [], [], []]
    assert said["5 True"] == [[STARTS]] * 4
    # Both replicas have saved the anchor, or only the first one has saved its weights.
    assert said["6 True"] == said["5 False"] == said["6 False"] == [[], [], [STARTS], [STARTS]]


def _fabric(rank: int, folder: Path) -> list[Any]:
    import lightning.fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    ons: list[DeviceMesh] = []

    def shard(model: nn.Module, _: DeviceMesh) -> nn.Module:
        ons.append(mesh(2))
        return sharded(ons[0]["shard"], model)

    strategy = ModelParallelStrategy(shard, data_parallel_size=4, tensor_parallel_size=1)
    fabric = lightning.fabric.Fabric(accelerator="cpu", devices=4, strategy=strategy)
    fabric.launch()
    model = fabric.setup(mlp())
    optimizer = fabric.setup_optimizers(local_steps(model, ons[0]))
    both = {"model": model, "optimizer": optimizer}
    return _saved_and_loaded(
        model,
        optimizer,
        fabric.backward,
        lambda: fabric.save(folder / "saved", both),
        lambda: fabric.load(folder / "saved", both),
        optimizer.finish,
    )


def _saved_and_loaded(model: nn.Module, optimizer: Any, backward: Any, save: Any, load: Any, finish: Any) -> list[Any]:
    """Bits of 8 steps, in a plain loop as well, and of a run that goes on from the fifth; and what was said."""
    records = logged()
    train(model, optimizer, range(5), backward)
    save()
    said = texts(records)
    train(model, optimizer, range(5, 8), backward)
    finish()
    bits = weight_bits(model)
    load()
    train(model, optimizer, range(5, 8), backward)
    finish()
    return [bits == in_a_plain_loop(), said, weight_bits(model), texts(records)]


def _check(ranks: list[list[Any]], starts: list[list[str]]) -> None:
    """``starts``: what the ranks say when they load."""
    assert all(is_equal for is_equal, *_ in ranks)
    assert [said for _, said, _, _ in ranks] == [[MIXES], [], [], []]
    assert len({bits for _, _, bits, _ in ranks}) == 1
    assert [[text for text in said if text == STARTS] for *_, said in ranks] == starts


def test_fabric(tmp_path: Path) -> None:
    _check(run(_fabric, 4, tmp_path, tmp_path, initialise=False), [[STARTS]] * 4)


def _accelerate(rank: int, folder: Path, in_shards: bool | None) -> list[Any]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from tests.integrations.test_transformers_fsdp import cpu_as_accelerator

    on = mesh(2)
    if in_shards is None:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare_model(sharded(on["shard"]), evaluation_mode=True)
        optimizer = accelerator.prepare(local_steps(model, on))
        train(model, optimizer, range(8), accelerator.backward)
        optimizer.optimizer.finish()
        return [weight_bits(model) == in_a_plain_loop()]
    kind = "SHARDED_STATE_DICT" if in_shards else "FULL_STATE_DICT"
    with cpu_as_accelerator():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False, state_dict_type=kind
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = sharded(on["shard"])
        model, optimizer = accelerator.prepare(model, local_steps(model, on))
        return _saved_and_loaded(
            model,
            optimizer,
            accelerator.backward,
            lambda: accelerator.save_state(folder / "saved"),
            lambda: accelerator.load_state(folder / "saved"),
            optimizer.optimizer.finish,
        )


@pytest.mark.parametrize("in_shards", [None, True, False])
def test_accelerate(tmp_path: Path, in_shards: bool | None) -> None:
    ranks = run(_accelerate, 4, tmp_path, tmp_path, in_shards)
    if in_shards is None:
        assert ranks == [[True]] * 4
    else:
        _check(ranks, [[STARTS]] * 4 if in_shards else [[], [], [STARTS], [STARTS]])
