"""Language modelling: tokenizers, windows, sources, the transformer and its runs."""

from __future__ import annotations

import csv
import hashlib
import http.server
import io
import json
import os
import tarfile
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from recipes.data import corpus, sources, wikitext
from recipes.data.named_files import check_named
from recipes.data.text import Windows
from recipes.data.tokenizers import Vocabulary, splitter
from recipes.data.wikitext import FALLBACK, WikiTextData
from recipes.errors import RecipeError
from recipes.measuring.metrics import PERPLEXITY
from recipes.training.train import train
from tests.recipes.conftest import run_script

TRAIN = " = Title = \n the cat sat on the mat . \n the dog sat . \n" * 20
VALID = " the cat sat on the zebra . \n" * 20

#: A run of some seconds: 20 steps of 256 tokens.
TINY = (
    "+exp=transformer_wikitext",
    "data.download=false",
    "data.vocabulary_size=500",
    "data.sequence_length=16",
    "data.batch_size=8",
    "data.train_samples=320",
    "data.valid_samples=64",
    "model.layers=1",
    "model.width=32",
    "model.heads=2",
    "model.inner=64",
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1",
    "threads=1",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with both splits under the names of the archive."""
    root = tmp_path / "texts"
    root.mkdir()
    (root / "wiki.train.tokens").write_text(TRAIN)
    (root / "wiki.valid.tokens").write_text(VALID)
    return root


def _data(tmp_path: Path, **settings: Any) -> WikiTextData:
    defaults: dict[str, Any] = {
        "name": "wikitext-2",
        "batch_size": 2,
        "tokenizer": "word",
        "vocabulary_size": 100,
        "sequence_length": 5,
        "download": False,
        "cache_dir": str(tmp_path / "cache"),
    }
    return WikiTextData(**{**defaults, **settings})


def _ready(data: WikiTextData) -> WikiTextData:
    data.prepare_data()
    data.setup()
    return data


# --- tokenizers ------------------------------------------------------------------------------------------------------


def test_words_are_what_whitespace_separates_and_lines_end() -> None:
    assert splitter("word", raw=False)(" a <unk> 's @-@ b \n\n c") == [
        "a",
        "<unk>",
        "'s",
        "@-@",
        "b",
        *["<eos>"] * 2,
        "c",
    ]


def test_raw_words_leave_their_punctuation() -> None:
    assert splitter("word", raw=True)("It's 3.5 (é)\n") == ["It", "'", "s", "3", ".", "5", "(", "é", ")", "<eos>"]


@pytest.mark.parametrize(("tokenizer", "text"), [("word", "b a a é \n c \n"), ("char", "Ünder a\tline\nb\n")])
def test_round_trip(tokenizer: str, text: str) -> None:
    tokens = splitter(tokenizer, raw=False)(text)
    vocabulary = Vocabulary(Counter(tokens), 100)
    assert [vocabulary.tokens[number] for number in vocabulary.encode(tokens)] == tokens
    joined = (" " if tokenizer == "word" else "").join(tokens).replace("<eos>", "\n")
    assert joined.split() == text.split()
    assert tokenizer == "word" or joined == text


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """Byte pairs of the training text, as Hugging Face's library writes them: 270 tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TRAIN], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_file_reads_text_as_it_is(folder: Path, tmp_path: Path, tokenizer_file: Path) -> None:
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    settings: dict[str, Any] = {"root": str(folder), "vocabulary_size": 270}
    text = _ready(_data(tmp_path, tokenizer=str(tokenizer_file), **settings)).splits
    assert library.decode(text.train.tolist()) == TRAIN
    assert library.decode(text.valid.tolist()) == VALID
    assert text.train.dtype == np.uint16
    # A name is looked for in data.root, too; a changed file makes another cache.
    (folder / "own.json").write_bytes(tokenizer_file.read_bytes())
    assert np.array_equal(_ready(_data(tmp_path, tokenizer="own.json", **settings)).splits.train, text.train)
    assert len(list((tmp_path / "cache").glob("text-*.npz"))) == 2


def test_a_tokenizer_file_that_cannot_be_used_is_refused(folder: Path, tmp_path: Path, tokenizer_file: Path) -> None:
    with pytest.raises(RecipeError, match=r"vocabulary_size=100 is not the 270 tokens .* set data.vocabulary_size=270"):
        _data(tmp_path, root=str(folder), tokenizer=str(tokenizer_file)).prepare_data()
    tokenizer_file.write_text("{}")
    with pytest.raises(RecipeError, match="is not a tokenizer of Hugging Face's library"):
        _data(tmp_path, root=str(folder), tokenizer=str(tokenizer_file)).prepare_data()
    with pytest.raises(RecipeError, match=r"data\.tokenizer=nowhere\.json is not a file"):
        _data(tmp_path, root=str(folder), tokenizer="nowhere.json")
    with pytest.raises(RecipeError, match=r"data\.tokenizer=nowhere\.json is not a file, neither in"):
        check_named({"root": str(folder), "tokenizer": "nowhere.json"})


def test_vocabulary_keeps_the_most_frequent_and_the_rest_is_unknown() -> None:
    counts = Counter({"d": 1, "c": 2, "b": 2, "a": 9, "<unk>": 50, "<eos>": 3})
    vocabulary = Vocabulary(counts, 5)
    assert vocabulary.tokens == ("<unk>", "<eos>", "a", "b", "c")
    assert vocabulary.encode(["c", "d", "<eos>", "<unk>", "never"]).tolist() == [4, 0, 1, 0, 0]
    assert len(Vocabulary(counts, 1000).tokens) == 6


def test_numbers_take_two_bytes_while_they_fit() -> None:
    assert Vocabulary(Counter("a"), 65_536).encode(["a"]).dtype == np.uint16
    assert Vocabulary(Counter("a"), 65_537).encode(["a"]).dtype == np.int32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": "bpe"}, r"data\.tokenizer='bpe' is not one of word, char"),
        ({"vocabulary_size": 2}, r"data\.vocabulary_size=2 must be at least 3"),
        ({"sequence_length": 0}, r"data\.sequence_length=0 must be at least 1"),
        ({"collection": "wikitext-3"}, r"data\.collection='wikitext-3' is not one of"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        _data(tmp_path, **settings)


# --- windows ---------------------------------------------------------------------------------------------------------


def test_targets_are_the_next_inputs_and_each_token_is_predicted_once() -> None:
    windows = Windows(np.arange(24, dtype=np.uint16), 5)
    assert len(windows) == 4  # the last three tokens do not fill a window
    inputs, targets = windows.__getitems__([2, 0, 3, 1])
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (4, 5)
    assert torch.equal(targets, inputs + 1)
    assert sorted(targets.flatten().tolist()) == list(range(1, 21))
    assert torch.equal(windows[2][0], inputs[:1])


def test_an_epoch_serves_every_window_in_another_order(folder: Path, tmp_path: Path) -> None:
    data = _ready(_data(tmp_path, root=str(folder)))
    ids = data.splits.train
    assert data.train_count == (len(ids) - 1) // 5 == 67
    torch.manual_seed(0)
    batches = list(data.train_dataloader())
    assert len(batches) == 33  # the last half batch is dropped in training
    inputs = torch.cat([batch[0] for batch in batches])
    in_order = torch.from_numpy(ids[: 66 * 5].astype(np.int64)).view(-1, 5)
    assert not torch.equal(inputs, in_order)
    assert sum(len(batch[1]) for batch in data.val_dataloader()) == (len(data.splits.valid) - 1) // 5 == 31


def test_parts_are_counted_in_windows(folder: Path, tmp_path: Path) -> None:
    data = _ready(_data(tmp_path, root=str(folder), train_samples=7, valid_samples=3))
    assert data.train_count == 7
    assert len(data.splits.valid) == 3 * 5 + 1
    with pytest.raises(RecipeError, match=r"data\.valid_samples=99 is out of range: 1 to 31"):
        _ready(_data(tmp_path, root=str(folder), valid_samples=99))
    with pytest.raises(RecipeError, match=r"train text has 340 tokens.*lower data\.sequence_length=1000"):
        _ready(_data(tmp_path, root=str(folder), sequence_length=1000))
    with pytest.raises(RecipeError, match="setup"):
        _ = _data(tmp_path).splits


# --- sources ---------------------------------------------------------------------------------------------------------


def test_folders_archives_and_usual_names_give_the_same_text(folder: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    (renamed / "train.txt").write_text(TRAIN)
    (renamed / "valid.txt").write_text(VALID)
    packed, tarred = tmp_path / "texts.zip", tmp_path / "texts.tar.gz"
    with zipfile.ZipFile(packed, "w") as archive:
        for file in folder.iterdir():
            archive.write(file, f"wikitext-2/{file.name}")
        archive.writestr("../wiki.escaped.tokens", "oops")
    with tarfile.open(tarred, "w:gz") as archive:
        archive.add(folder, "below/wikitext-2")
    roots = (folder, folder.parent / "texts", renamed, packed, tarred)
    texts = [_ready(_data(tmp_path, root=str(root))).splits for root in roots]
    words = sorted(set(TRAIN.split()))
    assert texts[0].train.max() == len(words) + 1
    assert (texts[0].valid == 0).sum() == 20  # the zebra
    for text in texts[1:]:
        assert np.array_equal(text.train, texts[0].train)
        assert np.array_equal(text.valid, texts[0].valid)
    assert not list(tmp_path.rglob("*escaped*"))


def test_named_files_replace_the_folders_and_are_part_of_the_name(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("one two three \n" * 9)
    data = _ready(_data(tmp_path, root=str(folder), train_file=str(mine)))
    assert data.data_name == data.splits.name == "wikitext-2 (trained on mine.txt)"
    assert len(data.splits.train) == 36
    with pytest.raises(RecipeError, match=r"there is no valid text: add data\.valid_file=FILE or data\.root=PATH"):
        _data(tmp_path, train_file=str(mine)).prepare_data()
    with pytest.raises(RecipeError, match=r"data\.train_file=.*absent\.txt is not a file"):
        _data(tmp_path, train_file=str(tmp_path / "absent.txt"), valid_file=str(mine)).prepare_data()


def test_folder_without_a_training_text_names_the_command(tmp_path: Path) -> None:
    for name in ("test.txt", "valid.txt"):
        (tmp_path / name).write_text(VALID)
    command = f"data.train_file={tmp_path}/test.txt data.valid_file={tmp_path}/valid.txt"
    with pytest.raises(RecipeError, match=f"holds no train text .*{command}"):
        _data(tmp_path, root=str(tmp_path)).prepare_data()


@pytest.mark.parametrize("name", ["absent", "empty", "file.txt", "broken.zip", "broken.tar"])
def test_a_root_that_is_nothing_known_is_an_error_whatever_fallback_says(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    for file in ("file.txt", "broken.zip", "broken.tar"):
        (tmp_path / file).write_bytes(b"no archive")
    with pytest.raises(RecipeError, match=r"data\.root=.*name it with data\.root|cannot be read .*is it complete\?"):
        _data(tmp_path, root=str(tmp_path / name), fallback=True).prepare_data()


def test_damaged_or_ambiguous_files_are_refused(folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "texts.zip"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in folder.iterdir():
            archive.write(file)
    damaged = bytearray(packed.read_bytes())
    damaged[100:110] = bytes(10)
    packed.write_bytes(damaged)
    with pytest.raises(RecipeError, match=r"texts\.zip cannot be read .*is it complete\?"):
        _data(tmp_path, root=str(packed)).prepare_data()
    (folder / "wiki.valid.tokens").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(RecipeError, match=r"wiki\.valid\.tokens is not UTF-8"):
        _data(tmp_path, root=str(folder)).prepare_data()
    (folder / "again").mkdir()
    (folder / "again" / "wiki.train.tokens").write_text(TRAIN)
    with pytest.raises(RecipeError, match="holds several"):
        _data(tmp_path, root=str(folder)).prepare_data()


def test_encoding_happens_once_until_a_file_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    original = corpus.encode

    def counting(train: Any, *rest: Any) -> Any:
        encoded.append(train.name)
        return original(train, *rest)

    monkeypatch.setattr(corpus, "encode", counting)
    first, second = (_ready(_data(tmp_path, root=str(folder))).splits for _ in range(2))
    assert len(encoded) == 1
    assert np.array_equal(first.train, second.train)
    _ready(_data(tmp_path, root=str(folder), vocabulary_size=5))
    assert len(encoded) == 2
    os.utime(folder / "wiki.train.tokens", (1, 1))
    _ready(_data(tmp_path, root=str(folder)))
    assert len(encoded) == 3
    for cached in (tmp_path / "cache").iterdir():
        cached.write_bytes(cached.read_bytes()[:100])
    with pytest.raises(RecipeError, match="delete it"):
        _ready(_data(tmp_path, root=str(folder)))


# --- download and fallback -------------------------------------------------------------------------------------------


@pytest.fixture
def served(folder: Path) -> Iterator[tuple[str, str]]:
    """URL of an archive on a server of this process that refuses urllib's own name, and its SHA-256."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for file in folder.iterdir():
            archive.write(file, f"wikitext-2/{file.name}")
    contents = buffer.getvalue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            refused = self.headers["User-Agent"].startswith("Python")
            self.send_response(403 if refused else 200)
            self.send_header("Content-Length", str(len(contents)))
            self.end_headers()
            if self.command == "GET" and not refused:
                self.wfile.write(contents)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/wikitext-2-v1.zip", hashlib.sha256(contents).hexdigest()
    server.shutdown()
    server.server_close()


def test_download_is_verified_and_kept(
    served: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, sha256 = served
    monkeypatch.setitem(wikitext.COLLECTIONS, "wikitext-2", (url, "0" * 64))
    wrong = _data(tmp_path, download=True)
    wrong.prepare_data()
    assert wrong.data_name == FALLBACK
    assert f'invalid hash value (expected "{"0" * 64}", got "{sha256}")' in capsys.readouterr().err
    assert not any(file.is_file() for file in tmp_path.glob("cache/*"))
    monkeypatch.setitem(wikitext.COLLECTIONS, "wikitext-2", (url, sha256))
    data = _ready(_data(tmp_path, download=True, fallback=False))
    assert data.splits.name == "wikitext-2"
    assert len(data.splits.train) == 340
    _ready(_data(tmp_path, download=False, fallback=False))  # what an earlier run has downloaded
    monkeypatch.setattr(sources, "unreachable", lambda url, timeout: None)  # the network fails after that
    monkeypatch.setitem(wikitext.COLLECTIONS, "wikitext-2", ("http://127.0.0.1:1/absent.zip", sha256))
    with pytest.raises(RecipeError, match="download of .* failed .*(refused|URL|404)"):
        _data(tmp_path, download=True, fallback=False).prepare_data()
    assert not list(tmp_path.glob("cache/*absent*"))


def test_without_text_the_fallback_says_so_or_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _ready(_data(tmp_path, vocabulary_size=5000))
    message = capsys.readouterr().err
    assert "WikiText is not here" in message
    assert FALLBACK in message
    assert "data.root=PATH" in message
    assert data.data_name == data.splits.name == FALLBACK
    assert len(data.splits.train) > 50_000
    assert len(data.splits.valid) > 5_000
    other = _data(tmp_path, vocabulary_size=5000)
    other.setup()  # a process that did not prepare
    assert other.data_name == FALLBACK
    with pytest.raises(
        RecipeError, match=r"there is no WikiText: .*data\.download is off; name it with data\.root=PATH"
    ):
        _data(tmp_path, fallback=False).prepare_data()
    with pytest.raises(RecipeError, match="there is no WikiText"):
        _data(tmp_path, fallback=False).setup()


# --- runs ------------------------------------------------------------------------------------------------------------


def _perplexities(folder: Path) -> list[float]:
    with open(folder / "metrics.csv", newline="") as file:
        return [float(row[PERPLEXITY.val]) for row in csv.DictReader(file) if row[PERPLEXITY.val]]


@pytest.mark.usefixtures("clean_process")
def test_a_run_names_its_text_and_its_metric(
    composed: Callable[..., DictConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = composed(*TINY, "optimizer.lr=0.01", "trainer.devices=1", f"data.cache_dir={tmp_path / 'cache'}")
    OmegaConf.resolve(cfg)
    result = train(cfg, tmp_path / "run")
    assert [result] == pytest.approx(_perplexities(tmp_path / "run"))
    assert result < 450  # 500 before
    output = capsys.readouterr()
    assert "WikiText is not here" in output.err
    assert f"transformer_wikitext on {FALLBACK}" in output.out
    facts = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (facts["data"], facts["metric"]) == (FALLBACK, "perplexity")
    assert FALLBACK in (tmp_path / "run" / "hparams.yaml").read_text()
    assert (tmp_path / "run" / "perplexity.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.usefixtures("clean_process")
def test_learns_more_than_how_frequent_words_are(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    learning = ("data.train_samples=2400", "trainer.max_epochs=2", "optimizer.lr=0.01", "trainer.log_every_n_steps=50")
    cfg = composed(*TINY, *learning, "trainer.devices=1", f"data.cache_dir={tmp_path / 'cache'}")
    OmegaConf.resolve(cfg)
    result = train(cfg, tmp_path / "run")
    first, last = _perplexities(tmp_path / "run")
    data = _ready(_data(tmp_path, vocabulary_size=500, sequence_length=16, valid_samples=64))
    frequency = (np.bincount(data.splits.train, minlength=500) + 1) / (len(data.splits.train) + 500)
    unigram = float(np.exp(-np.log(frequency[data.splits.valid[1:]]).mean()))
    assert result == pytest.approx(last)
    assert last < first
    assert last < 0.75 * unigram < 500


@pytest.mark.slow
def test_two_processes_with_gqsgd(tmp_path: Path) -> None:
    folder, cache = tmp_path / "run", tmp_path / "cache"
    arguments = (*TINY, "strategy=gqsgd", "optimizer.lr=0.01", f"data.cache_dir={cache}", f"hydra.run.dir={folder}")
    finished = run_script("run.py", *arguments, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr[-3000:]
    facts = json.loads((folder / "result.json").read_text())
    assert (facts["processes"], facts["steps"], facts["samples"]) == (2, 20, 320)
    assert facts["data"] == FALLBACK
    assert facts["bits_per_coordinate"] < 10
    assert facts["metrics"][PERPLEXITY.test] < 400  # 500 before
    assert f"transformer_wikitext on {FALLBACK}" in finished.stdout


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("GQSGD_DATA"), reason="needs the real data: set GQSGD_DATA")
def test_two_processes_on_real_text(tmp_path: Path) -> None:
    root, folder = Path(os.environ["GQSGD_DATA"]) / "wikitext2", tmp_path / "run"
    files = (f"data.train_file={root / 'test.txt'}", f"data.valid_file={root / 'valid.txt'}")
    own = (f"data.cache_dir={tmp_path / 'cache'}", f"hydra.run.dir={folder}")
    finished = run_script("run.py", *TINY, *files, *own, "strategy=gqsgd", "optimizer.lr=0.01", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr[-3000:]
    facts = json.loads((folder / "result.json").read_text())
    assert facts["data"] == "wikitext-2 (trained on test.txt)"
    assert facts["metrics"][PERPLEXITY.test] < 250  # 500 before
