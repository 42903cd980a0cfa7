"""Muon for the matrices of hidden layers and AdamW for all other parameters, as one optimizer.

Muon (K. Jordan et al. 2024) is `torch.optim.Muon`, which has the formulas. With the gradient G of a matrix of m rows
and n columns, the momentum B and the learning rate η, a step is

    B <- μ B + (1 - μ) G,   X <- (1 - η λ) X - 0.2 η √(max(m, n)) NS((1 - μ) G + μ B),

where NS is a Newton-Schulz iteration that brings all singular values near 1. The factor 0.2 √(max(m, n)) gives the step
the root mean square of a step of AdamW (J. Liu et al. 2025, arXiv 2502.16982, section 2.2), so that both optimizers
have one learning rate and one schedule.

MuLoCo (Thérien et al. 2025, arXiv 2505.23725) is DiLoCo with this optimizer inside: all singular values of a change of
a matrix are about as large, so that the changes of ranks agree in more directions, and few bits lose less of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from lightning_gqsgd.research.optim.closures import OwnOptimizer

#: Key of a parameter group that says which of the two optimizers it belongs to.
_KEY = "is_muon"


class MuonAdamW(OwnOptimizer):
    """Muon for matrices and AdamW for all other parameters; see the module.

    Use `matrices_of` to divide the parameters of a model::

        optimizer = MuonAdamW(*matrices_of(model), lr=1e-3)
        optimizer = LocalSteps(model, optimizer, preset="gqsgd_muloco")

    All groups are in ``param_groups``, so that learning-rate schedules reach both optimizers, and the state of all
    parameters is in ``state``.

    Args:
        matrices: parameters of two dimensions.
        others: all other parameters.
        lr: learning rate η of both, at least 0.
        weight_decay: λ of both, at least 0.
        momentum: μ of Muon, at least 0.
        betas: of AdamW.

    Raises:
        RuntimeError: torch has no Muon.
        ValueError: a matrix has not two dimensions, or a number is out of its range.

    State of each parameter: ``momentum_buffer`` of a matrix; of all others, that of `torch.optim.AdamW`.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: Iterable[Tensor],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise RuntimeError(
                f"MuonAdamW needs torch.optim.Muon, which torch {torch.__version__} has not; update torch"
            )
        self._parts: dict[bool, Optimizer] = {}
        matrices = list(matrices)
        others = list(others)
        if matrices:
            self._parts[True] = torch.optim.Muon(
                matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
            )
        if others:
            self._parts[False] = torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, betas=betas)
        groups = [{**group, _KEY: is_muon} for is_muon, part in self._parts.items() for group in part.param_groups]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    def _update(self) -> None:
        for is_muon, part in self._parts.items():
            # In each step anew, because loading a state replaces groups and state.
            part.param_groups = [group for group in self.param_groups if group[_KEY] == is_muon]
            part.state = self.state
            part.step()


def matrices_of(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the trained parameters of a model that Muon is for, and all others.

    Muon is for matrices that turn a hidden vector into another one. Tables of embeddings are no such matrices, even
    where a model also multiplies by one to make its logits. Neither is the weight of the last layer of a classifier,
    which only its author knows: move it to the others, or train it by Muon as well.

    Args:
        model: the model; a parameter that several modules share counts once.
    """
    tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
    }
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (matrices if parameter.ndim == 2 and id(parameter) not in tables else others).append(parameter)
    return matrices, others
