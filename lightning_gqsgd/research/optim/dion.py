"""Dion: orthonormal steps of low rank. Ranks average the factors of a step instead of gradients (arXiv 2504.05295).

For a matrix X of m rows and n columns, rank i has its own gradient G_i and momentum M_i, and all ranks have the same Q
of n rows and r columns. A step is

    M_i <- M_i + G_i
    P = orthonormal columns of mean_i (M_i Q)                 m r numbers are averaged
    R = mean_i (M_iᵀ P)                                       n r numbers are averaged
    M_i <- M_i - (1 - μ) P Rᵀ
    Q <- R, each column divided by its length
    X <- (1 - η λ) X - η √(m / n) P Qᵀ.

Both means are linear in M_i, so the step equals Dion's step on the mean of all gradients, up to rounding, although the
mean of the gradients is never computed: (m + n) r numbers are sent instead of m n. The part of the momentum that P Rᵀ
does not contain stays in the momentum. If averages are quantised (fields such as ``bits=8``), P and R differ, but are
the same on all ranks, and their errors also stay in the momentum.

Parameters that are no matrices are trained by AdamW, on the mean of their gradients. Every rank makes columns
orthonormal with `torch.linalg.qr`, so ranks have the same bits if their processors and libraries are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from lightning_gqsgd.research.optim.closures import ClosureOptimizer

#: Key of a parameter group that says whether it has matrices.
_KEY = "is_dion"


class Dion(ClosureOptimizer):
    """Trains a model on several ranks without DistributedDataParallel's averages of gradients; see the module's
    docstring.

    Use it with the module itself, or inside of ``no_sync()`` of DistributedDataParallel. All ranks start from the same
    parameters, and make equally many steps::

        optimizer = Dion(*matrices_of(model), lr=0.01)

    If torch.distributed is initialised, a step is a collective. Momenta differ between ranks, so each rank has to save
    its own state; after `average_momenta`, the state of one rank is enough.

    Args:
        matrices: parameters of two dimensions, in fp32.
        others: all other parameters, in fp32.
        lr: learning rate η of matrices, at least 0.
        rank_fraction: r divided by the smaller side of a matrix, above 0 and at most 1; r is rounded up.
        momentum: μ, 0 to 1.
        weight_decay: λ, at least 0.
        others_lr: learning rate of AdamW; None means η.
        betas: betas of AdamW.
        group: process group; None is the default group.
        **fields: fields of `GQSGDConfig` for averages, e.g. ``bits=8``. By default, fp32 numbers are averaged.

    Attributes:
        averaged_numel: number of values that the latest step has averaged.

    Raises:
        ValueError: if a number is out of its range, if a matrix does not have two dimensions, or if a parameter has
            another dtype.

    State of each matrix: ``momentum``, like the matrix, and ``basis``, Q.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: Iterable[Tensor] = (),
        lr: float = 0.01,
        rank_fraction: float = 0.25,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        others_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        group: dist.ProcessGroup | None = None,
        **fields: Any,
    ) -> None:
        matrices = list(matrices)
        others = list(others)
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} is out of range: at least 0, and finite")
        if not 0 <= momentum <= 1 or not 0 < rank_fraction <= 1:
            raise ValueError(
                f"momentum={momentum} is 0 to 1, and rank_fraction={rank_fraction} is above 0 and at most 1"
            )
        for matrix in matrices:
            if matrix.ndim != 2:
                raise ValueError(
                    f"Dion is for matrices, not for a parameter of shape {tuple(matrix.shape)}; give this one in "
                    "others, e.g. Dion(*matrices_of(model))"
                )
        for parameter in (*matrices, *others):
            if parameter.dtype != torch.float32:
                raise ValueError(f"Dion is for parameters in torch.float32, not {parameter.dtype}")
        groups: list[dict[str, Any]] = []
        if matrices:
            numbers = {"rank_fraction": rank_fraction, "momentum": momentum, "weight_decay": weight_decay}
            groups.append({"params": matrices, _KEY: True, "lr": lr, **numbers})
        self._adamw: Optimizer | None = None
        if others:
            self._adamw = torch.optim.AdamW(
                others, lr=lr if others_lr is None else others_lr, betas=betas, weight_decay=weight_decay
            )
            groups += [{**group, _KEY: False} for group in self._adamw.param_groups]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._group = group
        self._fields = {"bits": 32, **fields}
        self.averaged_numel = 0

    def _update(self) -> None:
        """Average the factors of matrices and the other gradients, and update all parameters that have a gradient.

        Raises:
            ConfigError: if the ranks do not agree, e.g. on which parameters have a gradient.
            CollectiveError: if a collective failed.
        """
        matrices = [(matrix, group) for group in self.param_groups if group[_KEY] for matrix in _trained(group)]
        others = [other for group in self.param_groups if not group[_KEY] for other in _trained(group)]
        momenta = [self._momentum(matrix, group) for matrix, group in matrices]
        bases = [self.state[matrix]["basis"] for matrix, _ in matrices]

        self.averaged_numel = 0
        left = [momentum @ basis for momentum, basis in zip(momenta, bases, strict=True)]
        means = self._means([*left, *(other.grad for other in others if other.grad is not None)])
        left = [torch.linalg.qr(mean).Q for mean in means[: len(left)]]
        right = self._means([momentum.T @ columns for momentum, columns in zip(momenta, left, strict=True)])

        for (matrix, group), momentum, basis, p, r in zip(matrices, momenta, bases, left, right, strict=True):
            momentum.addmm_(p, r.T, alpha=group["momentum"] - 1)
            basis.copy_(torch.nn.functional.normalize(r, dim=0))
            rows, columns = matrix.shape
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            matrix.addmm_(p, basis.T, alpha=-group["lr"] * math.sqrt(rows / columns))
        for other, mean in zip(others, means[len(left) :], strict=True):
            other.grad = mean
        if self._adamw is not None:
            # Set in each step, because loading a state replaces groups and state.
            self._adamw.param_groups = [group for group in self.param_groups if not group[_KEY]]
            self._adamw.state = self.state
            self._adamw.step()

    @torch.no_grad()
    def average_momenta(self) -> None:
        """Replace the momenta of all ranks by their mean, so that all ranks have the same state. Later steps do not
        change, up to rounding. A collective."""
        matrices = (matrix for group in self.param_groups if group[_KEY] for matrix in group["params"])
        kept = [self.state[matrix]["momentum"] for matrix in matrices if self.state[matrix]]
        for momentum, mean in zip(kept, self._means(kept), strict=True):
            momentum.copy_(mean)

    def _momentum(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        """Add the new gradient to the momentum of a matrix and return it. Creates the state in the first step."""
        state = self.state[matrix]
        if not state:
            rank = math.ceil(group["rank_fraction"] * min(matrix.shape))
            # The same on all ranks, without use of torch's global generator.
            generator = torch.Generator().manual_seed(matrix.shape[0] * 65537 + matrix.shape[1])
            state["momentum"] = torch.zeros_like(matrix)
            state["basis"] = torch.randn(matrix.shape[1], rank, generator=generator).to(matrix)
        return state["momentum"].add_(matrix.grad)

    def _means(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the mean of each tensor over ranks."""
        if not tensors:
            return []
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        self.averaged_numel += flat.numel()
        if dist.is_initialized() and dist.get_world_size(self._group) > 1:
            from lightning_gqsgd.ddp.functional import all_reduce  # not needed with one rank

            all_reduce(flat, group=self._group, out=flat, **self._fields)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _trained(group: dict[str, Any]) -> list[Tensor]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]
