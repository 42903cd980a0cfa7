"""Multi-step compression: a change is sent in R messages, each of which contains what the previous ones have left out
(NEOLITHIC, arXiv 2206.03665).

With error feedback, this rule needs no memory other than the configuration's. The first message has the codes of the
change plus the remembered error e. Each further message has the codes of zero plus e, the part that was left out:

    u_1 = Δ + e,   u_r = e for r = 2..R,   e <- u_r - C(u_r) after each message;   other ranks use Σ C(u_r).

So with a contraction, |x - C(x)|² <= (1 - δ) |x|², the loss after R messages is at most (1 - δ)^R of the original. The
owner of a shard answers each mean m_r of these messages at once, with the codes of m_r plus its own remembered error.
So (1 - δ)^R is no bound of the loss on the way back, because the last mean has only one answer. NEOLITHIC's server
waits for all R messages, and compresses the mean of their sums in R messages.

NEOLITHIC computes the gradients of R batches at the same point, one for each message. To do the same, accumulate the
gradients of R batches for each optimizer step (``accumulate_grad_batches`` of Lightning's Trainer).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_gqsgd.errors import ConfigError, check_integer, plain_integer
from lightning_gqsgd.local_steps.rules.base import Averager, MeanOf, Rule, RuleRequests

if TYPE_CHECKING:
    from lightning_gqsgd.config import GQSGDConfig
    from lightning_gqsgd.local_steps.fragments import Bundle


@dataclass(frozen=True)
class MultiStep(Rule):
    """Rule that sends a change in several messages; see the module's docstring.

    Args:
        messages: R, 1 to 1000.

    Raises:
        ConfigError: if the number is out of its range.
    """

    messages: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", plain_integer(self.messages))
        check_integer("messages", self.messages, 1, 1000)

    @property
    def most_requests(self) -> int:
        return self.messages

    def check(self, config: GQSGDConfig) -> None:
        memories = {"memory": config.up}
        if config.reducer == "two_shot":
            memories["memory_down"] = config.down
        for name, memory in memories.items():
            if memory is None or (memory.alpha, memory.beta, memory.rho) != (1, 1, 0):
                raise ConfigError(
                    f"rule='multi_step' sends again what messages have left out, so it needs {name}='ef', not "
                    f"{name}={getattr(config, name)!r}"
                )

    def averager(self, bundle: Bundle, ranks: int) -> Averager:
        return _MultiStepAverager(bundle, self.messages)


class _MultiStepAverager(Averager):
    def __init__(self, bundle: Bundle, messages: int) -> None:
        super().__init__(bundle)
        self._messages = messages

    def requests(self, change: Tensor) -> RuleRequests:
        total = (yield MeanOf(change, self._bundle.segments)).clone()
        for _ in range(self._messages - 1):
            total += yield MeanOf(torch.zeros_like(total), self._bundle.segments)
        return total
