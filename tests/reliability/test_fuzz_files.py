"""What comes from files and from other ranks, with random mutations: a value, or an error that says what to do."""

from __future__ import annotations

import json
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.choosing import codec_of
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels import cpu
from lightning_gqsgd.kernels.layout import Segment, cut, place
from lightning_gqsgd.kernels.protocol import Coding
from lightning_gqsgd.predict.costs import KINDS, Collective, Costs, Gamma
from lightning_gqsgd.predict.probe import Probe
from lightning_gqsgd.predict.timeline import Bucket, Timeline
from lightning_gqsgd.reducers import new_store
from lightning_gqsgd.reducers.elias import streams as elias
from lightning_gqsgd.reducers.memory import MemoryStore
from lightning_gqsgd.session.checkpoint import check_state, take_memory
from lightning_gqsgd.wire.agreement import CARD_BYTES, Card, verdict
from tests.reliability.knobs import chance, scaled
from tests.reliability.mutations import LEAVES, mutated, mutated_bytes

COLLECTIVE = Collective(1e-4, 1e-9, 1e-9, 1e-5, 1e-10)
TIMELINE = Timeline(
    (Bucket((Segment(0, 100, False), Segment(1, 10, True)), 0.1), Bucket((Segment(2, 50, False),), 0.2)),
    0.25,
    0.1,
    0.05,
    torch.bfloat16,
    "model",
)
COSTS = Costs({f"all {kind}": COLLECTIVE for kind in KINDS}, {"linear/8": Gamma(1e-9, 1e-9, 1e-9)}, 1e-9)
PROBE = Probe(COSTS, 2, 1, "gloo", "CPU", 1.0, (TIMELINE,))


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def check_probes(tmp_path: Path, count: int) -> None:
    """Load files that hold mutated probes."""
    numbers, file = chance("probe"), tmp_path / "probe.json"
    PROBE.save(file)
    written = file.read_text()
    assert Probe.load(file) == PROBE
    for number in range(count):
        if number % 2:
            file.write_bytes(mutated_bytes(numbers, written.encode()))
        else:
            file.write_text(json.dumps(mutated(numbers, json.loads(written))))
        try:
            loaded = Probe.load(file)
        except ConfigError as error:
            message = str(error)
        else:
            loaded.save(file)
            assert Probe.load(file) == loaded
            continue
        assert "gqsgd probe --output" in message
        assert "\n" not in message


def test_a_mutated_probe_is_a_probe_or_an_error_with_its_remedy(tmp_path: Path) -> None:
    check_probes(tmp_path, scaled(400))


@pytest.mark.reliability
def test_many_mutated_probes_are_probes_or_errors_with_their_remedy(tmp_path: Path) -> None:
    check_probes(tmp_path, scaled(20_000))


def test_a_probe_names_what_is_wrong_with_it(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    PROBE.save(file)
    written = json.loads(file.read_text())
    del written["timelines"][0]["backward_s"]
    file.write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="a timeline is a dictionary without backward_s; run `gqsgd probe"):
        Probe.load(file)
    written["timelines"][0]["backward_s"] = "0.25"
    file.write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="the timeline's backward_s is '0.25', and not a finite number from 0 on"):
        Probe.load(file)


def test_the_dtype_of_a_timeline_is_not_looked_up_in_torch() -> None:
    with pytest.raises(ConfigError, match="dtype='nn' is not one of 'float32'"):
        Timeline.from_dict({**TIMELINE.to_dict(), "dtype": "nn"})


def test_a_mutated_card_is_a_card_and_never_an_exception() -> None:
    numbers, card = chance("card"), Card("all_reduce", {"bits": 8, "dtype": "torch.float32"})
    for number in range(scaled(2000)):
        text = json.dumps(mutated(numbers, json.loads(card.to_json())))
        if number % 2:
            text = mutated_bytes(numbers, card.to_json().encode()).decode(errors="replace")
        other = Card.from_json(text)
        problem = verdict([card, other], range(2))
        same = (other.build, other.purpose, other.facts, other.error) == (card.build, card.purpose, card.facts, "")
        assert bool(problem) != same


def test_a_card_that_cannot_be_read_is_the_error_of_all_ranks() -> None:
    card = Card("all_reduce", {})
    for text in ("", "[" * CARD_BYTES, "7", '["all_reduce", {}, "", true, {}]'):  # the last one of an older build
        problem = verdict([card, Card.from_json(text)], range(2))
        assert f"rank 1 runs another build of lightning-gqsgd (its card: {text:.100}) than rank 0" in problem
        assert "install the same on all ranks" in problem


def state_of_two_ranks() -> tuple[dict[str, Any], GQSGDConfig, MemoryStore]:
    """A state with memories of two ranks and two parameters, its configuration, and a store to load it into."""
    config = resolve(GQSGDConfig(memory="diana", codec="linear", block_size=16), 2)
    store = new_store(setting_of(config, 2, torch.float32), {0: 100, 1: 32}, torch.device("cpu"))
    memory = {
        kind.value: {number: torch.randn(2, store.row(kind, number).numel()) for number in (0, 1)}
        for kind in store.kinds
    }
    state = {"schema": 1, "seed": 7, "step": 3, "config": config.to_dict(), "memory": memory}
    return state, config, new_store(setting_of(config, 2, torch.float32), {0: 100, 1: 32}, torch.device("cpu"))


def contents(store: MemoryStore) -> list[float]:
    return [float(store.row(kind, number).double().sum()) for kind in store.kinds for number in (0, 1)]


def test_a_mutated_state_is_loaded_whole_or_refused_whole() -> None:
    numbers = chance("state")
    tensors = [torch.zeros(2, 100), torch.zeros(2), torch.tensor(1.0), torch.zeros(2, 100, dtype=torch.int8)]
    leaves = [*LEAVES, *tensors, {0: torch.zeros(2, 100)}, {"up_error": {0: torch.zeros(2, 100)}}]
    for _ in range(scaled(600)):
        state, config, store = state_of_two_ranks()
        changed = mutated(numbers, state, leaves)
        before = contents(store)
        try:
            check_state(changed, config)
            taken = take_memory(store, changed, 0, 2)
        except ConfigError:
            taken = None
        if taken is None:
            assert contents(store) == before  # zero
        else:
            assert 0 <= changed["seed"] < 2**63
            assert 0 <= changed["step"] < 2**63


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("schema", True),
        ("schema", torch.zeros(2)),
        ("seed", 2**70),
        ("step", True),
        ("post_local_iter", "x"),
        ("config", {3: 4}),
        ("config", {"bits": torch.zeros(2)}),
        ("memory", 3),
        ("memory", {"up_error": 3}),
        ("memory", {"up_error": {0: 3}}),
        ("memory", {"up_error": {0: torch.zeros(2)}}),
    ],
)
def test_a_state_with_an_entry_of_another_type_is_refused(entry: str, value: object) -> None:
    state, config, store = state_of_two_ranks()
    with pytest.raises(ConfigError, match="gqsgd state"):
        take_memory(store, _checked({**state, entry: value}, config), 0, 2)


def _checked(state: dict[str, Any], config: GQSGDConfig) -> dict[str, Any]:
    check_state(state, config)
    return state


def check_elias(count: int) -> None:
    """Expand streams of Elias codes that are random, mutated, cut or filled with a byte."""
    numbers = chance("elias")
    for _ in range(count):
        config = GQSGDConfig(
            codec="linear",
            coder="elias",
            reducer="gather",
            bits=numbers.choice([2, 3, 4, 8]),
            dither="stochastic",
            block_size=numbers.choice([16, 64, 256]),
        )
        q = codec_of(config).quantiser(config.block_size)
        segments = [Segment(k, numbers.choice([0, 1, 17, 64, 300]), numbers.random() < 0.2) for k in range(3)]
        layout = place(cut(segments, q.block_size), q, shards=1, scale_bytes=2, raw_bytes=4)
        numel = sum(segment.numel for segment in segments)
        wire = torch.zeros(layout.message_bytes, dtype=torch.uint8)
        cpu.encode(torch.randn(numel), Coding(layout.blocks, q), wire, (1, 2))
        valid = elias.compress(wire, layout.blocks, q).numpy().tobytes()
        kind = numbers.randrange(3)
        data = numbers.randbytes(numbers.randrange(2 * len(valid) + 2)) if kind == 0 else mutated_bytes(numbers, valid)
        data = valid[: len(valid) // 2] + b"\xff" * (len(valid) // 2) if kind == 1 else data
        try:
            message = elias.expand(
                torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)), layout.blocks, q, len(wire)
            )
        except ValueError as error:
            refusal = str(error)
        else:
            decoded = torch.zeros(numel)
            cpu.decode(message[None], Coding(layout.blocks, q), decoded, [(1, 2)])
            elias.compress(message, layout.blocks, q)  # refuses codes beyond the levels
            continue
        assert "corrupt stream" in refusal


def test_a_corrupt_elias_stream_is_a_message_or_an_error() -> None:
    check_elias(scaled(300))


@pytest.mark.reliability
def test_many_corrupt_elias_streams_are_messages_or_errors() -> None:
    check_elias(scaled(30_000))


def test_expanding_a_corrupt_elias_stream_takes_no_more_memory_than_its_message() -> None:
    config = GQSGDConfig(codec="linear", coder="elias", reducer="gather", bits=8, dither="stochastic")
    q = codec_of(config).quantiser(config.block_size)
    layout = place(cut([Segment(0, 100_000, False)], q.block_size), q, shards=1, scale_bytes=2, raw_bytes=4)
    numbers = chance("elias memory")
    stream = torch.from_numpy(np.frombuffer(bytearray(numbers.randbytes(50_000)), np.uint8))
    for _ in range(2):  # the first time, tables are made
        tracemalloc.start()
        with pytest.raises(ValueError, match="corrupt stream"):
            elias.expand(stream, layout.blocks, q, layout.message_bytes)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 20 * layout.message_bytes
