"""DistributedDataParallel with torch's own compression hooks, the same on every device.

Lightning's own strategy differs in two ways. It registers communication hooks on CUDA only, and elsewhere does not say
that there is none. It also leaves the process group open at exit on every backend but NCCL; Gloo's threads then
sometimes abort a finished run, with exit code 134.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lightning_gqsgd.frameworks.distributed import after_setup
from lightning_gqsgd.sparse.options import tables_of
from recipes.errors import RecipeError

HOOKS = ("none", "bf16", "fp16", "powersgd")


class BaselineDDPStrategy(DDPStrategy):
    """DDPStrategy with one of torch's communication hooks.

    Args:
        hook: ``"none"`` (gradients travel in their own dtype), ``"bf16"``, ``"fp16"`` or ``"powersgd"``, which has one
            bucket of all gradients over Gloo.
        powersgd_rank: rank of PowerSGD's approximation.
        powersgd_start: number of optimizer steps at the start in which PowerSGD does not compress, at least 2.
        **arguments: arguments of DDPStrategy.

    Raises:
        RecipeError: an unknown hook; at set-up, PowerSGD over Gloo of gradients that do not fit one bucket.
    """

    def __init__(self, hook: str = "none", powersgd_rank: int = 4, powersgd_start: int = 100, **arguments: Any) -> None:
        if hook not in HOOKS:
            raise RecipeError(f"hook={hook!r} is not one of {', '.join(HOOKS)}")
        super().__init__(**arguments)
        self._hook = hook
        self._powersgd_rank, self._powersgd_start = powersgd_rank, powersgd_start
        self._powersgd: powerSGD_hook.PowerSGDState | None = None
        self._compressed_before = 0  # coordinates that PowerSGD had sent compressed at the end of the last step
        self._sparse_bytes: dict[str, int] = {}  # of the last step, by parameter with sparse gradients

    @property
    def is_one_bucket(self) -> bool:
        """Whether all gradients travel in one bucket, which PowerSGD needs over Gloo.

        torch's hook starts collectives inside callbacks. With several buckets, threads of Gloo start those of different
        buckets in any order, and processes hang, or abort when messages of different lengths meet.
        """
        return self._hook == "powersgd" and self._get_process_group_backend() == "gloo"

    def setup_distributed(self) -> None:
        """Set up the process group, then finish as in `distributed.after_setup`."""
        super().setup_distributed()
        after_setup(self.world_size)

    def configure_ddp(self) -> None:
        """Wrap the model, register the hook, and prepare the count of bytes."""
        if self.is_one_bucket:
            self._ddp_kwargs["bucket_cap_mb"] = self._mib_of_one_bucket()
        super().configure_ddp()
        model = self.model
        assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
        sparse = self._count_sparse(model.module)
        self._numel_by_itemsize = [
            (p.numel(), p.element_size())
            for name, p in model.module.named_parameters()
            if p.requires_grad and name not in sparse
        ]
        if sparse and self.root_device.type != "cpu":
            raise RecipeError(
                f"{min(sparse)} has sparse gradients, which are exchanged on CPU only, this is "
                f"{self.root_device.type}: NCCL does not add sparse tensors. Take model.sparse=false, or hardware=cpu"
            )
        if self._hook == "bf16":
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        elif self._hook == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self._hook == "powersgd":
            self._powersgd = powerSGD_hook.PowerSGDState(
                # Collectives of DDP itself, e.g. with find_unused_parameters, must not come between those of callbacks.
                process_group=torch.distributed.new_group() if self.is_one_bucket else None,
                matrix_approximation_rank=self._powersgd_rank,
                start_powerSGD_iter=self._powersgd_start,
            )
            model.register_comm_hook(self._powersgd, powerSGD_hook.powerSGD_hook)

    def _mib_of_one_bucket(self) -> int:
        """A limit of DDP's buckets that all gradients stay below. If it is given, the first bucket has it, too."""
        assert self.model is not None
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        tables = [*tables_of(self.model)]
        by_dtype = {p.dtype: name for name, p in trained.items()}
        for reason, remedy in (
            (tables and f"{tables[0]} has sparse gradients", "take model.sparse=false"),
            (
                len(by_dtype) > 1 and f"{' and '.join(by_dtype.values())} have different dtypes",
                "give all one dtype",
            ),
            (
                "bucket_cap_mb" in self._ddp_kwargs and "bucket_cap_mb limits buckets",
                "leave strategy.bucket_cap_mb out",
            ),
        ):
            if reason:
                raise RecipeError(
                    f"strategy=powersgd over Gloo: {reason}, and all gradients have to fit one bucket, because torch's "
                    f"hook hangs or aborts with several; {remedy}, or take strategy=ddp_bf16 or gqsgd_4bit"
                )
        return 1 + sum(p.numel() * p.element_size() for p in trained.values()) // 2**20

    def bytes_sent_in_step(self, ring_factor: float) -> float:
        """Bytes that this process has sent of the last step's gradients, if every all-reduce is a ring.

        Sparse gradients travel by an all-gather of row numbers and rows: a ring sends n - 1 such messages.
        """
        compressed = self._powersgd.total_numel_after_compression if self._powersgd else 0
        newly_compressed, self._compressed_before = compressed - self._compressed_before, compressed
        if newly_compressed:
            return ring_factor * newly_compressed * 4  # PowerSGD sends fp32
        two_bytes = self._hook in ("bf16", "fp16")
        dense = ring_factor * sum(numel * (2 if two_bytes else size) for numel, size in self._numel_by_itemsize)
        return dense + (self.world_size - 1) * sum(self._sparse_bytes.values()) if self._sparse_bytes else dense

    def _count_sparse(self, module: torch.nn.Module) -> set[str]:
        """Count the bytes of sparse gradients from now on; returns the names of their parameters."""
        tables = tables_of(module, frozen=True)

        def count(name: str, table: torch.Tensor) -> None:
            # Here, before DDP sends the gradient: afterwards it has the rows of all processes.
            assert table.grad is not None
            rows = table.grad._indices().unique().numel()
            size = 2 if self._hook in ("bf16", "fp16") else table.element_size()
            self._sparse_bytes[name] = rows * (8 + table[0].numel() * size)  # row numbers are int64

        for name, table in tables.items():
            table.register_post_accumulate_grad_hook(partial(count, name.removesuffix(".weight")))
        return set(tables)
