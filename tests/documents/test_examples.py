"""The scripts of examples/ at a small size."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import gpu
import pytest
import torch.distributed as dist
import turns
from processes import ranks

from selfattn_ext.terminal import CommandError

EXAMPLES = Path(__file__).parents[2] / "examples"
SENTENCES = "the cat sat on the mat. the dog sat on the log. " * 40


def assert_printed(capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    printed = capsys.readouterr().out
    assert [part for part in parts if part not in printed] == []


ON_DEVICE = ["--rate", "1e-2", "--device", gpu.DEVICE]


def check_training(script: str, given: list[str]) -> None:
    """Asserts that a small model learns the sentences."""
    sizes = {"layers": 1, "heads": 2, "width": 16, "steps": 60}
    small = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    losses = runpy.run_path(str(EXAMPLES / script))["main"]([*small, *given])
    # A guess among 14 or 15 symbols has a loss of their logarithm, 2.6 or 2.7.
    assert len(losses) == 60
    assert losses[0] > 2.2
    assert losses[-1] < 1.5


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(["--backend", "eager"], marks=pytest.mark.thorough),
        ["--no-compile", "--dtype", "float32"],
    ],
    ids=str,
)
def test_train_gpt(
    how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    book = tmp_path / "book.txt"
    book.write_text(SENTENCES, encoding="utf-8")
    check_training("train_gpt.py", ["--text", str(book), "--context", "16", "--batch", "4", *ON_DEVICE, *how])
    assert_printed(capsys, str(book), "kernel   ", "step    60", "tokens/s", "held-out loss", "sample:")


@pytest.mark.parametrize("how", [[], ["--compile", "--backend", "eager"]], ids=str)
def test_train_packed(
    how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    book = tmp_path / "book.txt"
    sentences = SENTENCES.split(". ")
    book.write_text(
        "\n\n".join(" ".join(sentences[:count]) for count in (1, 2, 3, 1, 5, 2, 8)), encoding="utf-8"
    )
    check_training(
        "train_packed.py", ["--text", str(book), "--tokens", "256", "--context", "200", *ON_DEVICE, *how]
    )
    assert_printed(capsys, str(book), "7 paragraphs of 22 to", "step    60", "documents", "% padding")


@pytest.mark.cpu_only("flex_attention computes on the CPU alone")
def test_train_with_functions(tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None) -> None:
    book, bias, mask = tmp_path / "book.txt", tmp_path / "bias.png", tmp_path / "mask.png"
    book.write_text("\n\n".join(SENTENCES[:600].split(". ")), encoding="utf-8")
    given = ["--text", str(book), "--bias", str(bias), "--mask", str(mask)]
    check_training("train_with_functions.py", [*given, "--length", "96", "--distances", "20"])
    assert_printed(
        capsys, str(book), "paragraphs", "step    60", "learned bias", "head   1", str(bias), str(mask)
    )
    assert bias.read_bytes()[:4] == mask.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.cpu_only("flex_attention computes on the CPU alone")
@pytest.mark.parametrize("option", ["--bias", "--mask"])
def test_train_with_functions_asks_before_training_for_what_draws(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "seaborn", None)
    main = runpy.run_path(str(EXAMPLES / "train_with_functions.py"))["main"]
    with pytest.raises(ImportError, match=r"pip install 'selfattn_ext\[viz\]'"):
        main(["--steps", "1", option, "picture.png"])
    assert capsys.readouterr().out == ""


LONG = ["--tokens", "260", "--width", "16", "--heads", "2", "--steps", "3", "--rate", "1e-2"]


def check_losses(printed: str, expected: list[float]) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert losses == pytest.approx(expected, abs=2e-5)
    assert re.search(r"tokens/s +[\d.]+ MB sent", printed)


def train_long(how: list[str]) -> list[float]:
    """Trains on a rank of a group that exists."""
    main = runpy.run_path(str(EXAMPLES / "train_long.py"))["main"]
    main.__globals__["process_group"] = lambda device: nullcontext(dist.get_rank())
    return main([*LONG, *how])


@pytest.mark.cpu_only("starts processes on gloo")
@pytest.mark.xdist_group("split_attention")
def test_train_long(capsys: pytest.CaptureFixture[str], one_thread: None) -> None:
    """One process and two processes have the same losses."""
    expected = runpy.run_path(str(EXAMPLES / "train_long.py"))["main"](LONG)
    assert expected[-1] < expected[0]
    printed = capsys.readouterr().out
    assert "symbols for 1 process: " in printed
    check_losses(printed, expected)
    for losses in ranks(2)(train_long, ["--checkpoints"]):
        assert losses == pytest.approx(expected, abs=2e-5)


MORE_LONG = [
    (2, ["--shard", "--checkpoints"]),
    (4, ["--rotate", "allgather", "--layout", "contiguous"]),
    (4, ["--method", "ulysses", "--shard"]),
]


@pytest.mark.thorough
@pytest.mark.cpu_only("starts processes on gloo")
@pytest.mark.parametrize(("count", "how"), turns.chosen(MORE_LONG), ids=str)
def test_train_long_by_torchrun(count: int, how: list[str], one_thread: None) -> None:
    script = str(EXAMPLES / "train_long.py")
    expected = runpy.run_path(script)["main"](LONG)
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}", script]
    run = subprocess.run(
        [sys.executable, *start, *LONG, *how], capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    check_losses(run.stdout, expected)
    assert len(re.search(r"memory +([\d, -]+) MB", run.stdout)[1].split(",")) == count


@pytest.mark.parametrize("script", ["train_gpt.py", "train_packed.py"])
@pytest.mark.parametrize(
    ("content", "reason"), [(b"\x7fELF\0\0", "is not a text file"), (b"", r"has (0 characters|no paragraph)")]
)
def test_training_refuses_what_is_no_text(script: str, content: bytes, reason: str, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_bytes(content)
    with pytest.raises(CommandError, match=reason):
        runpy.run_path(str(EXAMPLES / script))["main"](["--text", str(book), "--no-compile"])


def test_generate(capsys: pytest.CaptureFixture[str], one_thread: None) -> None:
    """The tokens are the same with a cache in slots, in pages, and without one."""
    main = runpy.run_path(str(EXAMPLES / "generate.py"))["main"]
    small = ["--layers", "2", "--tokens", "10", "--device", gpu.DEVICE]
    texts = main([*small, "--compare"])
    printed = capsys.readouterr().out
    assert "the tokens are the same" in printed
    assert len({*texts}) > 1
    for text in texts:
        assert len(text) == 10
        assert text.isascii()
        assert text.isprintable()
        assert f" -> {text!r}\n" in printed
    assert main([*small, "--page-size", "5", "--pages", "27", "--at-a-time", "3"]) == texts


@pytest.mark.parametrize("given", [["--tokens", "0"], ["", "abc"], ["--dtype", "int8"]], ids=str)
def test_generate_refuses_nothing_to_do(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLES / "generate.py"))["main"]
    with pytest.raises(SystemExit):
        main(given)
    assert "error: " in capsys.readouterr().err


@pytest.mark.cpu_only("the example computes on the CPU alone")
def test_interatomic_potential(capsys: pytest.CaptureFixture[str], one_thread: None) -> None:
    example = runpy.run_path(str(EXAMPLES / "interatomic_potential.py"))
    for attention in example["ATTENTION"].values():
        assert max(example["errors_of_gradients"](attention)) < 1e-6
    ours, formula = example["main"](["--quick", "--dtype", "float64"]).values()
    assert ours == pytest.approx(formula, rel=1e-8)
    assert max(ours[-3:]) < 0.8 * ours[0]
    assert_printed(capsys, "27 in each of 2, open", "in float64", "step   10", "ms for a step")


@pytest.mark.cpu_only("the example computes on the CPU alone")
def test_mean_flow(capsys: pytest.CaptureFixture[str], one_thread: None) -> None:
    ours, formula = runpy.run_path(str(EXAMPLES / "mean_flow.py"))["main"](
        ["--quick", "--dtype", "float64"]
    ).values()
    assert ours == pytest.approx(formula, rel=1e-8)
    assert sum(ours[-10:]) < 0.9 * sum(ours[:10])
    assert_printed(capsys, "step   30", "ms for a step", "one step from noise")


def test_train_qk_clip(tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None) -> None:
    """The largest score of every head stays under the bound, beyond which it goes otherwise, and the reward
    keeps the weights spread.
    """
    book = tmp_path / "book.txt"
    book.write_text(SENTENCES, encoding="utf-8")
    small = ["--layers", "2", "--heads", "2", "--width", "16", "--context", "24", "--steps", "80"]
    given = ["--text", str(book), "--device", gpu.DEVICE, *small]
    train = runpy.run_path(str(EXAMPLES / "train_qk_clip.py"))["main"]
    free = train([*given, "--bound", "inf"])
    bound = 0.7 * max(free.largest)
    clipped = train([*given, "--bound", str(bound)])
    assert max(clipped.largest) < bound < max(free.largest)
    assert clipped.loss[-1] < 1.5
    rewarded = train([*given, "--bound", "inf", "--entropy", "0.3"])
    assert rewarded.entropy[-1] > free.entropy[-1] + 0.1
    assert_printed(capsys, "step    80", "largest score", "entropy")


@pytest.mark.cpu_only("its cache is on the CPU")
def test_evict_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None) -> None:
    """The perplexity with half of the cache is within two hundredths of that with all of it."""
    book = tmp_path / "book.txt"
    book.write_text(SENTENCES, encoding="utf-8")
    small = ["--layers", "2", "--heads", "2", "--width", "32", "--context", "48", "--steps", "120"]
    given = ["--text", str(book), *small, "--sequences", "8", "--rate", "1e-2"]
    found = runpy.run_path(str(EXAMPLES / "evict_cache.py"))["main"](given)
    assert found["all keys"] < 2.0
    assert found["least weight"] < 1.02 * found["all keys"]
    assert_printed(capsys, "given up", "least weight     24", "oldest           24", "by chance        24")


@pytest.mark.cpu_only("its model and caches are on the CPU")
def test_generate_with_trees(tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None) -> None:
    """The text is that of one token at a time, and of one pass over it; more guesses need fewer steps."""
    book = tmp_path / "book.txt"
    book.write_text(SENTENCES, encoding="utf-8")
    small = ["--layers", "2", "--heads", "2", "--width", "32", "--context", "48", "--steps", "120"]
    given = ["--text", str(book), *small, "--prompt", "12", "--rate", "1e-2", "--sequences", "3"]
    main = runpy.run_path(str(EXAMPLES / "generate_with_trees.py"))["main"]
    single, narrow, wide = (main([*given, "--branches", *branches]) for branches in ((), "11", "32"))
    assert single.steps == 35 > narrow.steps > wide.steps
    assert narrow.tokens == wide.tokens == [tokens[:34] for tokens in single.tokens]
    printed = capsys.readouterr().out
    assert printed.count("one pass over the texts chooses the same tokens") == 3
    assert f"34 tokens for each in {wide.steps} steps, with trees of 10 tokens" in printed


@pytest.mark.cpu_only("the example computes on the CPU alone")
def test_train_block_selector(capsys: pytest.CaptureFixture[str], one_thread: None) -> None:
    """What the trained selector chooses comes closest to all keys."""
    small = ["--context", "128", "--warm-up", "100", "--steps", "40", "--rate", "1e-2", "--selected", "3"]
    found = runpy.run_path(str(EXAMPLES / "train_block_selector.py"))["main"](small)
    assert found["all keys"] < 0.1
    assert found["all keys"] < found["selector"] < 0.8 * min(found["most recent"], found["by chance"])
    assert_printed(capsys, "a text: ", "selector     step    39", "with 3 of 8 blocks per query")
