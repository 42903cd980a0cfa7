"""Puts decisions of `auto` into words, and reports them."""

from __future__ import annotations

from lightning_gqsgd.errors import in_ms
from lightning_gqsgd.spec.decisions import Decision


def describe(decision: Decision, *, is_plain: bool = False, is_earlier: bool = False, is_open: bool = False) -> str:
    """Returns a decision and its reason on one line.

    Args:
        decision: the decision.
        is_plain: whether plain DDP replaces the hook under this decision.
        is_earlier: whether it is a decision of the run whose state this run has loaded, so that other bits may be in
            use.
        is_open: whether a trial is under way that may change the decision.
    """
    what = f"{'the run before took' if is_earlier else 'auto takes'} {decision.bits} bits from step {decision.step} on"
    text = f"{what} ({': '.join([*_times(decision), decision.reason])})"
    return text if is_earlier or is_open else f"{text}. {_how_to_keep(decision, is_plain)}"


def _times(decision: Decision) -> list[str]:
    """Returns the measured and predicted times as one item, or no item if no time was measured."""
    times = [
        f"{bits} bits {in_ms(seconds)}{_as_predicted(decision, bits)}" for bits, seconds in decision.seconds.items()
    ]
    untried = [bits for bits, seconds in decision.predicted.items() if seconds and bits not in decision.seconds]
    times += [f"{bits} bits not tried{_as_predicted(decision, bits)}" for bits in untried]
    return [", ".join(times)] if times else []


def _how_to_keep(decision: Decision, is_plain: bool) -> str:
    # At 32 bits, the hook is slower than plain DDP, and the decision was for plain DDP.
    how = "use plain DDP, without gqsgd" if is_plain else f"give auto=False, bits={decision.bits}"
    return f"To keep that in other runs, {how}"


def _as_predicted(decision: Decision, bits: int) -> str:
    seconds = decision.predicted.get(bits)
    if seconds is None:
        return ""
    return f" (predicted {'at least ' if bits in decision.at_least else ''}{in_ms(seconds)})"
