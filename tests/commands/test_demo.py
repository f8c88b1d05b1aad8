"""The demo: its text, its model, the race of three copies, and the command in a few steps."""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from tolerances import FLOORS

from selfattn_ext import demo
from selfattn_ext.commands.cli import main
from selfattn_ext.demo import race, text
from selfattn_ext.demo.model import (
    CharTransformer,
    ModelSize,
    extension_attention,
    formula_attention,
    torch_attention,
)
from selfattn_ext.terminal import CommandError

DEVICE = torch.device(gpu.DEVICE)
SMALL = ModelSize(layers=2, heads=2, width=16, context=16)
SENTENCES = "the cat sat on the mat. the dog sat on the log. " * 40


@pytest.fixture(autouse=True)
def _short_and_small(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Uses one thread, as models as tiny as these gain nothing by more and lose much on a busy machine."""
    monkeypatch.setattr(demo, "SAMPLE_LENGTH", 20)
    monkeypatch.setattr(race, "HELD_OUT_SEQUENCES", 8)


def corpus(content: str = SENTENCES, context: int = SMALL.context) -> text.Corpus:
    return text.Corpus(text.Text(content, "a test"), context)


def test_demo_trains_compares_samples_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book, picture = tmp_path / "book.txt", tmp_path / "drawn.png"
    book.write_text(SENTENCES, encoding="utf-8")
    given = {"text": book, "steps": 3, "seed": 5, "out": picture, "device": gpu.DEVICE}
    assert main(["demo", *(word for name, value in given.items() for word in (f"--{name}", str(value)))]) == 0
    printed = capsys.readouterr()
    assert str(book) in printed.out
    for name, _ in demo.ATTENTIONS:
        assert re.search(rf"^{name} .*\d", printed.out, re.MULTILINE), name
    assert "they agree" in printed.out
    assert f"attention heatmap: {picture}" in printed.out
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "training 3/3" in printed.err


def small(folder: Path, **options: Any) -> demo.Options:
    book = folder / "book.txt"
    book.write_text(SENTENCES, encoding="utf-8")
    return demo.Options(text=book, size=SMALL, device=gpu.DEVICE, out=folder / "drawn.png", **options)


def test_demo_reports_an_attention_that_computes_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sees_the_future(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    monkeypatch.setattr(demo, "ATTENTIONS", (("selfattn_ext", sees_the_future), *demo.ATTENTIONS[1:]))
    # A few steps are needed, as attention does not yet matter in the untrained model.
    assert demo.run(small(tmp_path, steps=4)) == 1
    assert "MORE than rounding explains" in capsys.readouterr().out


def test_demo_without_matplotlib_says_what_to_install_and_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert demo.run(small(tmp_path, steps=1)) == 0
    before, _, after = capsys.readouterr().out.partition("attention by")
    assert re.search(r"^picture none: .*pip install 'selfattn_ext\[viz\]'$", before, re.MULTILINE)
    assert "they agree" in after
    assert "heatmap" not in after


def test_demo_stops_early_on_a_slow_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(small(tmp_path, steps=50, max_seconds=1e-9)) == 0
    printed = capsys.readouterr().out
    assert "stopped after 1 of 50 steps" in printed
    assert "sample (cut short by --max-seconds)" in printed


class SlowMachine:
    """A clock that only work moves: a step of one copy takes a second, and all else takes as long in
    proportion as was measured on two processors with the demo's model.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0

        def slow(owner: Any, name: str, seconds: Callable[..., float]) -> None:
            work = getattr(owner, name)

            def takes_long(*arguments: Any, **keywords: Any) -> Any:
                self.now += seconds(*arguments)
                return work(*arguments, **keywords)

            monkeypatch.setattr(owner, name, takes_long)

        slow(demo, "line_up", lambda *arguments: 75.0)
        slow(CharTransformer, "loss", lambda *arguments: 1.0 if torch.is_grad_enabled() else 4.0)
        slow(CharTransformer, "forward", lambda model, tokens, cache=None: 0.05 if cache else 0.0)
        slow(demo.viz, "plot_layers", lambda *arguments: 60.0)
        for name in ("monotonic", "perf_counter"):
            monkeypatch.setattr(time, name, lambda: self.now)


def test_demo_as_a_whole_keeps_to_its_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "SAMPLE_LENGTH", 400)
    machine = SlowMachine(monkeypatch)
    start = machine.now
    assert demo.run(small(tmp_path, max_seconds=250.0)) == 0
    assert 210.0 < machine.now - start <= 251.0
    assert "to finish within" in capsys.readouterr().out


def test_the_twins_learn_and_their_losses_agree() -> None:
    found = corpus()
    twins = race.line_up(demo.ATTENTIONS, len(found.symbols), SMALL, DEVICE)
    assert race.train(twins, found, 60, 8, 0, DEVICE, race.Budget(600)) == 60
    ours = twins[0]
    assert len(ours.losses) == len(ours.seconds) == 60
    # Guessing among 15 symbols has a loss of log(15), 2.7.
    assert ours.losses[0] > 2.2
    assert ours.losses[-1] < 1.0
    assert race.held_out_loss(ours.model, found, DEVICE) < 1.2
    # They may be twice as far apart as the other two, plus a rounding per step.
    floor = len(ours.losses) * FLOORS[torch.float32]
    for other in twins[1:]:
        assert race.largest_difference(ours, other) <= 2 * race.largest_difference(*twins[1:]) + floor


def test_the_race_takes_turns_on_the_same_batches() -> None:
    turns = []

    class Recorder(race.Contender):
        def step(self, tokens: torch.Tensor, targets: torch.Tensor, learning_rate: float) -> None:
            turns.append((self.name, tokens.sum().item(), learning_rate))
            super().step(tokens, targets, learning_rate)

    found = corpus()
    twins = race.line_up(demo.ATTENTIONS, len(found.symbols), SMALL, DEVICE)
    recorders = [Recorder(twin.name, twin.model, twin.optimizer) for twin in twins]
    race.train(recorders, found, 3, 2, 0, DEVICE, race.Budget(600))
    names = [name for name, _ in demo.ATTENTIONS]
    assert [name for name, _, _ in turns] == names * 3
    for step in range(3):
        assert len({turn[1:] for turn in turns[3 * step : 3 * step + 3]}) == 1
    assert len({tokens for _, tokens, _ in turns}) == 3


def test_the_three_attentions_are_the_same_function() -> None:
    query, key, value = torch.randn(3, 2, 3, 9, 8, dtype=torch.float64)
    expected = formula_attention(query, key, value)
    torch.testing.assert_close(torch_attention(query, key, value), expected)
    torch.testing.assert_close(extension_attention(query, key, value), expected)


def test_attention_maps_are_causal_softmax_weights() -> None:
    model = CharTransformer(10, SMALL, extension_attention)
    maps = model.attention_maps(torch.arange(10))
    assert maps.shape == (SMALL.layers, SMALL.heads, 10, 10)
    torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]))
    assert not maps.triu(1).any()


def test_the_model_sees_positions_but_not_the_future() -> None:
    # The model has one layer, as in deeper ones the causal rule alone reveals positions.
    model = CharTransformer(10, ModelSize(layers=1, heads=2, width=16, context=16), extension_attention)
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.out.weight)  # with the initial zeros, attention has no effect
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    logits = model(tokens)
    changed = tokens.clone()
    changed[0, 3] = 9
    torch.testing.assert_close(model(changed)[:, :3], logits[:, :3])
    assert not torch.allclose(model(changed)[:, 5], logits[:, 5])
    swapped = tokens[:, [1, 0, 2, 3, 4, 5]]
    assert not torch.allclose(model(swapped)[:, 5], logits[:, 5])


def test_samples_go_beyond_the_context_and_follow_the_seed() -> None:
    model = CharTransformer(10, SMALL, extension_attention)
    prompt = torch.tensor([1, 2, 3])
    first, again = (model.sample(prompt, 30, torch.Generator().manual_seed(3)) for _ in range(2))
    assert first.shape == (33,)
    assert torch.equal(first[:3], prompt)
    assert torch.equal(first, again)
    assert not torch.equal(first, model.sample(prompt, 30, torch.Generator().manual_seed(4)))


def test_samples_are_the_same_without_a_cache() -> None:
    model = CharTransformer(10, SMALL, extension_attention)
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.out.weight)  # with initial zeros, attention has no effect
    prompt = torch.tensor([1, 2, 3])
    texts = [
        model.sample(prompt, 40, torch.Generator().manual_seed(3), cached=cached) for cached in (True, False)
    ]
    assert torch.equal(*texts)


@pytest.mark.parametrize("stripped", [False, True])
def test_every_python_has_text_to_train_on(stripped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if stripped:
        monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    found = text.from_python()
    assert len(found.content) > (40_000 if stripped else 300_000)
    assert "iterable" in found.content
    text.Corpus(found, ModelSize().context)


def test_text_of_any_encoding_is_read(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("Größe\n".encode("latin-1") * 50)
    assert "Gr\N{REPLACEMENT CHARACTER}" in text.from_file(path).content


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_no_part_of_the_text(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "marked.txt"
    path.write_text("Größe\r\n", encoding=encoding, newline="")
    assert text.from_file(path).content == "Größe\n"


@pytest.mark.parametrize(
    "content",
    [
        b"\x7fELF\2\1\1\0" + b"text " * 200,
        bytes(range(1, 256)) * 4,
        b"\1\2abc" * 200,
        SENTENCES.encode("utf-16-le"),
        "съешь ещё этих мягких булок ".encode("cp1251") * 40,
    ],
    ids=["program", "bytes", "control characters", "UTF-16 without a mark", "cp1251"],
)
def test_what_is_no_text_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(CommandError, match=r"file is not a text file in UTF-8"):
        text.from_file(path)


@pytest.mark.parametrize(
    ("name", "message"), [("missing", "No such file"), ("", "Is a directory")], ids=["missing", "folder"]
)
def test_a_file_that_cannot_be_read_is_an_error_of_the_command(
    name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CommandError, match=f"cannot read the text file .*: {message}"):
        text.from_file(tmp_path / name)


def test_characters_that_the_font_lacks_give_no_warnings(tmp_path: Path) -> None:
    found = corpus("".join(map(chr, range(0x4E00, 0x4E20))) * 20)
    model = CharTransformer(len(found.symbols), SMALL, extension_attention)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        demo._draw_attention(model, found.prompt(4), found, tmp_path / "drawn.png")


def test_corpus_encodes_what_it_knows_and_folds_the_rest() -> None:
    many = "".join(map(chr, range(0x4E00, 0x4E00 + 500)))
    found = corpus("ab" * 600 + many)
    assert len(found.symbols) == text.MAX_SYMBOLS
    assert found.decode(found.encode("abba")) == "abba"
    assert found.decode(found.encode(many[-1] + "a")) == text.UNKNOWN + "a"


def test_batches_are_shifted_windows_of_the_training_part() -> None:
    found = corpus("0123456789" * 50, context=8)
    tokens, targets = found.batch(5, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (5, 8)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    again, _ = found.batch(5, torch.Generator().manual_seed(0))
    assert torch.equal(tokens, again)
    held_out, following = found.held_out_batch(4)
    assert torch.equal(held_out[:, 1:], following[:, :-1])
    assert len(found.training) + len(found.held_out) == 500


def test_the_prompt_is_a_line_of_letters() -> None:
    tail = "\n  | 12 |\nonce upon a time there\n= = = =\n" + "-" * 30
    found = corpus("abcdefghijklmnopqrstuvwxyz" * 60 + tail, context=8)
    assert found.decode(found.prompt(10)) == "once upon "


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(CommandError, match=r"10 characters; training with a context of 8 needs at least 36"):
        corpus("0123456789", context=8)
