"""Times and rates that users write have one grammar, wherever they are read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.local_steps.options import parse_time
from lightning_gqsgd.spec.quantities import RATES, TIMES, bytes_per_second, quantity, rate_in_words, seconds
from netlab.errors import NetLabError
from netlab.units import parse_delays, parse_rate

#: What reads times, and the error that it raises.
READERS: dict[str, tuple[Callable[[str], float], type[Exception]]] = {
    "local steps": (lambda text: parse_time("every", text).total_seconds(), ConfigError),
    "predictions": (lambda text: seconds(text, "--latency"), ConfigError),
    "netlab": (lambda text: parse_delays(text, "none")[0], NetLabError),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("text", "expected"),
    [("5s", 5.0), ("250ms", 0.25), (" 1.5 S ", 1.5), (".5s", 0.5), ("2.s", 2.0), ("600us", 6e-4), ("600µs", 6e-4)],
)
def test_every_reader_of_times_reads_the_same(name: str, text: str, expected: float) -> None:
    read, _ = READERS[name]
    assert read(text) == pytest.approx(expected)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "text", ["", "5", "s", "-1s", "+1s", "1e3s", "1s2s", "1 day", "1,5s", "s5", "5ss", "9" * 400 + "h"]
)
def test_every_reader_of_times_refuses_the_same(name: str, text: str) -> None:
    read, error = READERS[name]
    with pytest.raises(error):
        read(text)


def test_long_times_and_rates_have_units() -> None:
    assert [quantity(text, TIMES) for text in ("2min", "1.5h")] == [120.0, 5400.0]
    assert [quantity(text, RATES) for text in ("100mbit", "2.5 Gbit", "3.2tbit")] == [1e8, 2.5e9, 3.2e12]
    assert quantity("100mbit", TIMES) is quantity("5s", RATES) is None
    assert rate_in_words(1.25e9) == "10gbit"
    assert parse_rate("2.5 Gbit") == 8 * bytes_per_second("2.5 Gbit", "--link") == 2.5e9
    with pytest.raises(NetLabError, match="out of range"):
        parse_rate("9" * 400 + "gbit")
