"""The code of docs/metrics.md, run as a user would."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

from tests.distributed.models import loss_of, mlp
from tests.distributed.ranks import on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@on_ranks(2)
def test_errors_by_layer_are_printed_and_are_the_same_on_all_ranks(rank: int) -> str:
    (section,) = re.findall(r"^## Errors by layer\n(.*?)^## ", PAGE.read_text(), re.M | re.S)
    code = textwrap.dedent("\n".join(line for line in section.split("\n") if not line or line.startswith("    ")))
    model = DistributedDataParallel(mlp())
    names = {"model": model, "loss_of": lambda model: loss_of(model, rank, 0)}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102
    errors = {line.split()[0]: float(line.split()[1]) for line in printed.getvalue().splitlines()}
    assert errors.keys() == {name for name, _ in model.module.named_parameters()}
    assert all(0 < error < 0.5 if name.endswith("weight") else error == 0 for name, error in errors.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    return printed.getvalue()
