"""Muon for the matrices of hidden layers and AdamW for all other parameters, as one optimizer.

Muon (K. Jordan et al. 2024) is `torch.optim.Muon`, which has the formulas. With the gradient G of a matrix of m rows
and n columns, the momentum B and the learning rate η, a step is

    B <- μ B + (1 - μ) G,   X <- (1 - η λ) X - 0.2 η √(max(m, n)) NS((1 - μ) G + μ B),

where NS is a Newton-Schulz iteration that brings all singular values close to 1. With the factor 0.2 √(max(m, n)), the
step has the same root mean square as a step of AdamW (J. Liu et al. 2025, arXiv 2502.16982, section 2.2), so both
optimizers can share one learning rate and one schedule.

MuLoCo (Thérien et al. 2025, arXiv 2505.23725) is DiLoCo with this optimizer inside: all singular values of a matrix's
change are about equal, so the changes of ranks agree in more directions, and codes of few bits lose less of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from lightning_gqsgd.research.optim.closures import ClosureOptimizer

#: Key of a parameter group that says to which of the two optimizers it belongs.
_KEY = "is_muon"


class MuonAdamW(ClosureOptimizer):
    """Muon for matrices and AdamW for all other parameters; see the module's docstring.

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
        betas: betas of AdamW.

    Raises:
        RuntimeError: if torch has no Muon.
        ValueError: if a matrix does not have two dimensions, or if a number is out of its range.

    State of each parameter: ``momentum_buffer`` for a matrix; for all others, the state of `torch.optim.AdamW`.
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
                f"MuonAdamW needs torch.optim.Muon, which torch {torch.__version__} does not have; update torch"
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
            # Set in each step, because loading a state replaces groups and state.
            part.param_groups = [group for group in self.param_groups if group[_KEY] == is_muon]
            part.state = self.state
            part.step()


def matrices_of(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Divide the trained parameters of a model into those for Muon and all others.

    Muon is for matrices that map a hidden vector to another one. Tables of embeddings are no such matrices, even if a
    model also uses one to compute its logits. The weight of a classifier's last layer is no such matrix either, but
    this function cannot recognise it: move it to the others, or also train it with Muon.

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
