"""Adagrad with an L1 penalty, by composite mirror descent and by regularised dual averaging.

Both are methods of Duchi, Hazan and Singer (JMLR 12, 2011). With the gradient g_t of step t, the learning rate η, the
penalty λ |x|_1 and

    S_t = S_{t-1} + g_t²,   H_t = ε + sqrt(S_t)   (coordinate by coordinate),

a step is

    CMD:  x_{t+1} = argmin over x of  η <g_t, x> + η λ |x|_1 + ½ <x - x_t, H_t (x - x_t)>
                  = soft(x_t - η g_t / H_t, η λ / H_t),
    RDA:  x_{t+1} = argmin over x of  η <mean of g_1 .. g_t, x> + η λ |x|_1 + 1/(2t) <x, H_t x>
                  = -η soft(g_1 + .. + g_t, λ t) / H_t,

where soft(z, c) = sign(z) max(|z| - c, 0) sets coordinates exactly to zero. QCMD Adagrad and QRDA Adagrad (Xu, Wangni,
Zhang, Ye, Wu, Zhao 2022) are these two methods with quantised gradients: the gradient after the communication hook is
used everywhere, including S.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_gqsgd.research.optim.closures import ClosureOptimizer


class _ProximalAdagrad(ClosureOptimizer):
    """Base class with the parts that both methods share."""

    #: State of each parameter in addition to its number of steps: tensors like the parameter, initially zero.
    _KEPT: tuple[str, ...] = ("sum",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.05,
        l1: float = 1e-3,
        eps: float = 1e-2,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        if not lr >= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not l1 >= 0.0:
            raise ValueError(f"Invalid l1 value: {l1}")
        if not eps > 0.0:
            raise ValueError(f"Invalid epsilon value: {eps}")
        super().__init__(params, {"lr": lr, "l1": l1, "eps": eps, "foreach": foreach, "maximize": maximize})

    def _update(self) -> None:
        """Update all parameters that have a gradient.

        Raises:
            RuntimeError: if a gradient is sparse, or if a parameter is complex.
        """
        for group in self.param_groups:
            for parameters in self._lists(group):
                self._step_list(parameters, group)

    def _lists(self, group: dict[str, Any]) -> list[list[Tensor]]:
        """Returns the parameters with a gradient, in lists for single calls of foreach operations."""
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in trained:
            if parameter.grad.is_sparse:
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
            if parameter.is_complex():
                raise RuntimeError(f"{type(self).__name__} does not support complex parameters")
            self._remember(parameter)
        foreach = group["foreach"]
        if foreach is None:  # as in torch: lists save kernel launches on a GPU, but need more memory
            foreach = all(parameter.is_cuda for parameter in trained)
        if not foreach:
            return [[parameter] for parameter in trained]
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in trained:
            alike.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        return list(alike.values())

    def _remember(self, parameter: Tensor) -> None:
        """Create the state of a parameter in its first step."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in self._KEPT:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def _step_list(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Make a step of parameters of one device and dtype."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        states = [self.state[parameter] for parameter in parameters]
        for state in states:
            state["step"] += 1
        sums = [state["sum"] for state in states]
        torch._foreach_addcmul_(sums, gradients, gradients)
        scales = list(torch._foreach_sqrt(sums))
        torch._foreach_add_(scales, group["eps"])
        self._move(parameters, gradients, scales, group)

    @abstractmethod
    def _move(
        self, parameters: list[Tensor], gradients: list[Tensor], scales: list[Tensor], group: dict[str, Any]
    ) -> None:
        """Update parameters of one device and dtype; ``scales`` are their H, which may be changed."""


class CMDAdagrad(_ProximalAdagrad):
    """Adagrad with an L1 penalty by composite mirror descent: x <- soft(x - η g / H, η λ / H).

    H is ε + sqrt(sum of squared gradients), and soft(z, c) = sign(z) max(|z| - c, 0) sets coordinates to zero, exactly
    (Duchi, Hazan, Singer, JMLR 12, 2011). With l1=0, results in fp32 and fp64 have the bits of `torch.optim.Adagrad`
    with this ``eps``.
    On gradients that the communication hook has quantised, this is QCMD Adagrad (Xu et al. 2022): noise of the
    quantisation moves zeros away from zero, so coarse codes make models less sparse.

    Args:
        params: parameters, or dictionaries of parameter groups.
        lr: learning rate η, at least 0.
        l1: weight λ of the penalty λ |x|_1, at least 0.
        eps: ε, above 0.
        foreach: whether to update all parameters of a device in a few calls, which needs three times the memory of the
            parameters. None: only if all parameters are on a GPU.
        maximize: whether to maximise the objective minus the penalty.

    Raises:
        ValueError: if a number is out of its range.

    State of each parameter: ``step``, and ``sum`` like the parameter.
    """

    def _move(
        self, parameters: list[Tensor], gradients: list[Tensor], scales: list[Tensor], group: dict[str, Any]
    ) -> None:
        torch._foreach_addcdiv_(parameters, gradients, scales, value=-group["lr"])
        if not group["l1"]:
            return
        # x - clamp(x, -t, t) is soft(x, t), and exactly zero where |x| <= t.
        torch._foreach_reciprocal_(scales)
        torch._foreach_mul_(scales, group["lr"] * group["l1"])
        clamped = list(torch._foreach_minimum(parameters, scales))
        torch._foreach_neg_(scales)
        torch._foreach_maximum_(clamped, scales)
        torch._foreach_sub_(parameters, clamped)


class RDAAdagrad(_ProximalAdagrad):
    """Adagrad with an L1 penalty by regularised dual averaging: x <- -η soft(sum of gradients, λ t) / H in step t.

    H and soft are those of `CMDAdagrad` (Duchi, Hazan, Singer, JMLR 12, 2011). A coordinate is zero as long as the mean
    of its gradients is at most λ, so noise without bias hardly makes models less sparse. On gradients that the
    communication hook has quantised, this is QRDA Adagrad (Xu et al. 2022).

    The result of a step does not depend on the previous values of the parameters. So the first step replaces the
    initial parameters: the method is for models that may start at zero, such as linear ones, and not for networks.

    Arguments and errors are those of `CMDAdagrad`.

    State of each parameter: ``step``, and ``sum`` and ``gradient_sum`` like the parameter.
    """

    _KEPT = ("sum", "gradient_sum")

    def _move(
        self, parameters: list[Tensor], gradients: list[Tensor], scales: list[Tensor], group: dict[str, Any]
    ) -> None:
        states = [self.state[parameter] for parameter in parameters]
        totals = [state["gradient_sum"] for state in states]
        torch._foreach_add_(totals, gradients)
        limits = [group["l1"] * float(state["step"]) for state in states]
        clamped = list(torch._foreach_clamp_max(totals, limits))
        torch._foreach_clamp_min_(clamped, [-limit for limit in limits])
        moved = list(torch._foreach_sub(totals, clamped))
        torch._foreach_div_(moved, scales)
        torch._foreach_mul_(moved, -group["lr"])
        torch._foreach_copy_(parameters, moved)
