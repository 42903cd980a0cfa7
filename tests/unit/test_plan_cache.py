"""Plans are found by the values that they depend on, whichever objects have them."""

from __future__ import annotations

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import setting_of
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.wire import plan as plans
from lightning_gqsgd.wire.plan import Plan, PlanCache, PlanKey

CONFIGS = [(GQSGDConfig(bits=bits, reducer="gather"),) for bits in (8, 4)]
SEGMENTS = [(Segment(0, numel, False),) for numel in (1000, 2000, 3000)]


def _key(config: int, segments: int, *, is_new: bool) -> PlanKey:
    """Returns a key of the objects above, or of new ones that are equal."""
    key = PlanKey(CONFIGS[config], SEGMENTS[segments], torch.float32, True)
    return PlanKey(copy.deepcopy(key.configs), (key.segments[0]._replace(),), key.dtype, True) if is_new else key


def _plan(key: PlanKey) -> Plan:
    return Plan(key.segments, setting_of(key.configs[0], 2, key.dtype))


USES = st.tuples(st.integers(0, 1), st.integers(0, 2), st.booleans())
ACTIONS = st.lists(st.one_of(USES, st.sampled_from(["drop", "clear"])), max_size=30)


@given(ACTIONS)
def test_a_plan_is_made_once_for_equal_values_until_it_is_dropped(actions: list[tuple[int, int, bool] | str]) -> None:
    cache = PlanCache()
    kept: dict[tuple[int, int], tuple[Plan, int]] = {}
    for step, action in enumerate(actions):
        if action == "clear":
            cache.clear()
            kept = {}
        elif action == "drop":
            cache.drop_unused(step - 3)
            kept = {place: (plan, used) for place, (plan, used) in kept.items() if used >= step - 3}
        else:
            assert not isinstance(action, str)
            config, segments, is_new = action
            key = _key(config, segments, is_new=is_new)
            plan = cache.get(key, step, lambda key=key: _plan(key))  # type: ignore[misc]  # mypy infers no default
            assert plan.numel == key.segments[0].numel
            before = kept.get((config, segments))
            assert before is None or before[0] is plan
            kept[config, segments] = (plan, step)
        assert len(cache) == len(kept)


def test_the_plans_that_were_used_last_stay(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    cache = PlanCache()
    for step in range(3):
        cache.get(_key(0, step, is_new=True), step, lambda step=step: _plan(_key(0, step, is_new=False)))  # type: ignore[misc]
    first = cache.get(_key(0, 0, is_new=False), 3, lambda: _plan(_key(1, 0, is_new=False)))
    monkeypatch.setattr(plans, "MAX_PLAN_BYTES", first.nbytes)
    cache.trim()
    assert len(cache) == 1
    assert cache.get(_key(0, 0, is_new=True), 4, lambda: _plan(_key(1, 0, is_new=False))) is first
