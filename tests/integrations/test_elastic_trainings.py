"""Members that come and go, in each framework: every process is a training of its own, and all end with one model."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lightning_gqsgd import ConfigError
from tests.distributed.ranks import run
from tests.distributed.test_elastic import lighthouse  # noqa: F401
from tests.integrations import elastic_trainings as trainings
from tests.marks import skip_without_torchft

skip_without_torchft()


#: The most steps of a round: one takes 10 ms at least, and a round 300 ms.
STEPS_OF_A_ROUND = 30


def check(results: list[dict[str, Any]]) -> None:
    """Members have the same model, with the steps of both in it.

    On a busy machine, the first member may merge before the second one has come. That one then goes on from the
    first one's state, without the steps of its first round.
    """
    first, second = results
    assert first["bits"] == second["bits"]
    assert first["samples"] == second["samples"]
    missing = first["steps"] + second["steps"] - first["samples"]
    assert 0 <= missing <= STEPS_OF_A_ROUND
    assert first["learns"]
    assert second["learns"]


#: One framework that makes the steps itself and one whose user does, and the others as slow tests.
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("fabric", "transformers")]


@pytest.mark.parametrize("name", ["lightning", "accelerate", *SLOW])
def test_members_of_each_framework_end_with_one_model(name: str, tmp_path: Path, lighthouse: str) -> None:  # noqa: F811
    pytest.importorskip(name if name != "fabric" else "lightning")
    function = getattr(trainings, name)
    results = run(function, 2, tmp_path, lighthouse, str(tmp_path), initialise=False, torchrun=False)
    check(results)


@pytest.mark.slow
def test_members_resume_from_their_checkpoints(tmp_path: Path, lighthouse: str) -> None:  # noqa: F811
    given = {"initialise": False, "torchrun": False}
    before = run(trainings.lightning, 2, tmp_path, lighthouse, str(tmp_path), **given)
    after = run(trainings.lightning, 2, tmp_path, lighthouse, str(tmp_path), True, **given)
    assert after[0]["bits"] == after[1]["bits"]
    assert after[0]["samples"] > before[0]["samples"]
    assert [result["steps"] for result in after] == [3 * trainings.STEPS] * 2


@pytest.mark.parametrize(("hook", "steps"), [("validation_step", trainings.STEPS), ("on_train_batch_end", 21)])
def test_a_machine_with_notice_merges_what_it_has_learnt_where_lightning_ends_the_fit_itself(
    hook: str,
    steps: int,
    tmp_path: Path,
    lighthouse: str,  # noqa: F811
) -> None:
    (found,) = run(trainings.terminated, 1, tmp_path, lighthouse, str(tmp_path), hook, initialise=False, torchrun=False)
    assert found["exits"] in (None, 0)  # the exit code of both is 0
    assert found["steps"] == found["samples"] == steps
    assert found["merged"]


def test_a_strategy_goes_by_the_clock_only_where_processes_train_by_themselves() -> None:
    from lightning_gqsgd import GQSGDStrategy

    with pytest.raises(ConfigError, match="give elastic=True"):
        GQSGDStrategy(local_steps="20s")
    with pytest.raises(ConfigError, match="local_steps=32"):
        GQSGDStrategy(elastic=True)


@pytest.mark.parametrize("name", ["GQSGDStrategy", "GQSGDFabricStrategy"])
@pytest.mark.parametrize("given", [{}, {"timeout": timedelta(seconds=7)}, {"timeout": "7s"}])
def test_members_do_not_wait_for_a_dead_one_as_long_as_lightnings_ranks_do(
    name: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import lightning_gqsgd
    from lightning_gqsgd.frameworks import local

    asked: dict[str, Any] = {}
    monkeypatch.setattr(local, "MergedAverages", lambda *_, **named: asked.update(named))
    strategy = getattr(lightning_gqsgd, name)(local_steps="20s", elastic=True, **given)
    strategy._local.begin(nn.Linear(1, 1), [], strategy.gqsgd_config, strategy._timeout)
    assert asked == {"timeout": timedelta(seconds=7) if given else None}


@pytest.mark.parametrize("fields", [{"local_steps": 32}, {"local_steps": "20s", "elastic": True}], ids=str)
def test_a_trainer_of_transformers_takes_the_timeout_of_its_averages(fields: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from lightning_gqsgd import enable
    from tests.integrations.trainers import trainer_of

    callback = enable(trainer_of(tmp_path), **fields, timeout="7s")
    assert callback._local.given_timeout == timedelta(seconds=7)
    with pytest.raises(ConfigError, match="timeout='7' is not a time: write a number and a unit"):
        enable(trainer_of(tmp_path), **fields, timeout=7)
