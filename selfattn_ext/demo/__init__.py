"""The subcommand ``demo``: three copies of a small transformer train in turns.

They have the same initial weights and see the same batches, but attend by this package, by torch's fused
attention, and by the plain formula.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from selfattn_ext import viz
from selfattn_ext.demo import text
from selfattn_ext.demo.model import (
    CharTransformer,
    ModelSize,
    extension_attention,
    formula_attention,
    torch_attention,
)
from selfattn_ext.demo.race import (
    Budget,
    Contender,
    held_out_loss,
    largest_difference,
    line_up,
    train,
    with_attention,
)
from selfattn_ext.terminal import PICTURE_FORMATS, CommandError, check_output, describe, table, waiting

ATTENTIONS = (
    ("selfattn_ext", extension_attention),
    ("torch SDPA", torch_attention),
    ("plain formula", formula_attention),
)
BATCH_SIZE = 8
PROMPT_LENGTH = 32
SAMPLE_LENGTH = 400
DRAWN_LENGTH = 40
# The work after the training, in passes over the held-out sequences: the comparison makes six, and the sample
# takes about as long as these.
AFTER_TRAINING = 12
# With the same weights the three differ only by rounding, about 1e-6 in float32 for a loss of a few nats.
SAME_WEIGHTS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Options:
    """The options of the command line; see ``python -m selfattn_ext demo --help``."""

    text: Path | None = None
    steps: int = 400
    seed: int = 0
    device: str = "cpu"
    out: Path = Path("demo_attention.png")
    max_seconds: float = 60.0
    size: ModelSize = field(default_factory=ModelSize)


def run(options: Options) -> int:
    """Trains, compares, samples, draws. Returns 0, or 1 if the three do not compute the same."""
    budget = Budget(options.max_seconds)
    device = _usable_device(options.device)
    check_output("--out", options.out, PICTURE_FORMATS)
    torch.manual_seed(options.seed)
    corpus_text = text.from_python() if options.text is None else text.from_file(options.text)
    corpus = text.Corpus(corpus_text, options.size.context)
    contenders = line_up(ATTENTIONS, len(corpus.symbols), options.size, device)
    _print_setting(options, corpus_text, corpus, contenders[0].model, device)
    draws = _announce_picture(options.out)

    # The time of what follows the training is estimated before it. The picture takes about as long as the
    # set-up with the imports of the drawing libraries, as both are work of Python on one processor.
    set_up = budget.spent()
    for_picture = set_up if draws else 0.0
    held_out_loss(contenders[0].model, corpus, device)
    kept = for_picture + AFTER_TRAINING * (budget.spent() - set_up)
    done = train(contenders, corpus, options.steps, BATCH_SIZE, options.seed, device, budget, kept)
    if done < options.steps:
        print(
            f"stopped after {done} of {options.steps} steps, to finish within {options.max_seconds:g} s "
            "(--max-seconds)"
        )
    print()
    _print_comparison(contenders, corpus, device)
    agree = _print_agreement(contenders, corpus, device)

    model = contenders[0].model
    sample = _print_sample(model, corpus, options.seed, device, lambda: budget.left(for_picture) > 0)
    if draws:
        _draw_attention(model, sample[: min(DRAWN_LENGTH, options.size.context)], corpus, options.out)
    print(f"\ntotal {budget.spent():.0f} s")
    return 0 if agree else 1


def _usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        # A tiny call fails for a torch without CUDA, a missing GPU and a build without CUDA kernels alike.
        extension_attention(*torch.zeros(3, 1, 1, 1, 8, device=device))
    except (RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
        raise CommandError(f"device {name!r} cannot be used: {describe(error)}") from error
    return device


def _print_setting(
    options: Options, source: text.Text, corpus: text.Corpus, model: CharTransformer, device: torch.device
) -> None:
    size = options.size
    parameters = sum(parameter.numel() for parameter in model.parameters())
    hint = "" if options.text else "; --text FILE for yours"
    print(f"text    {len(source.content):,} characters, {len(corpus.symbols)} symbols: {source.origin}{hint}")
    print(
        f"model   {size.layers} layers of {size.heads} heads of {size.head_dim} dimensions, causal, float32, "
        f"{parameters:,} parameters"
    )
    print(
        f"steps   {options.steps} with {BATCH_SIZE} x {size.context} characters, three copies in turns, "
        f"seed {options.seed}, {device.type}, {torch.get_num_threads()} threads"
    )


def _announce_picture(path: Path) -> bool:
    """Prints before training, and returns, whether there will be a picture; matplotlib may be missing."""
    try:
        viz.require()
    except ImportError as error:
        print(f"picture none: {describe(error)}\n", flush=True)
        return False
    print(f"picture {path}\n", flush=True)
    return True


def _print_comparison(contenders: Sequence[Contender], corpus: text.Corpus, device: torch.device) -> None:
    tokens = BATCH_SIZE * corpus.context
    ours = contenders[0].step_seconds()
    with waiting("computing the losses on held-out text"):
        held_out = [held_out_loss(contender.model, corpus, device) for contender in contenders]
    rows = []
    for contender, loss in zip(contenders, held_out, strict=True):
        seconds = contender.step_seconds()
        rows.append(
            [
                contender.name,
                f"{contender.losses[0]:.4f}",
                f"{statistics.fmean(contender.losses[-10:]):.4f}",
                f"{loss:.4f}",
                f"{seconds * 1e3:.1f}",
                f"{tokens / seconds:,.0f}",
                f"{seconds / ours:.2f}",
            ]
        )
    header = ["attention by", "first loss", "last losses", "held out", "ms/step", "tokens/s", "time / ours"]
    print(table(header, rows))


def _print_agreement(contenders: Sequence[Contender], corpus: text.Corpus, device: torch.device) -> bool:
    ours, fused, formula = contenders
    print(
        f"\nlargest difference of the losses over {len(ours.losses)} steps: "
        f"{largest_difference(ours, fused):.1e} to torch SDPA, "
        f"{largest_difference(ours, formula):.1e} to the formula "
        f"({largest_difference(fused, formula):.1e} between those two)"
    )
    with waiting("comparing the three on the same weights"):
        held_out = [
            held_out_loss(with_attention(ours.model, len(corpus.symbols), attention), corpus, device)
            for _, attention in ATTENTIONS
        ]
    difference = max(held_out) - min(held_out)
    agree = difference < SAME_WEIGHTS_TOLERANCE  # False for NaN, too
    verdict = "they agree" if agree else f"MORE than rounding explains ({SAME_WEIGHTS_TOLERANCE:.0e})"
    print(f"the three on the same trained weights: held-out losses within {difference:.1e}: {verdict}")
    return agree


def _print_sample(
    model: CharTransformer,
    corpus: text.Corpus,
    seed: int,
    device: torch.device,
    may_go_on: Callable[[], bool],
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    prompt = corpus.prompt(PROMPT_LENGTH).to(device)
    with waiting("sampling"):
        sample = model.sample(prompt, SAMPLE_LENGTH, generator, may_go_on=may_go_on).cpu()
    short = "" if len(sample) == len(prompt) + SAMPLE_LENGTH else " (cut short by --max-seconds)"
    print(f"\nsample{short}, from {corpus.decode(prompt)!r} on:")
    for line in corpus.decode(sample).splitlines():
        print(f"  | {line}")
    return sample


def _draw_attention(model: CharTransformer, tokens: Tensor, corpus: text.Corpus, path: Path) -> None:
    maps = model.attention_maps(tokens.to(model.head.weight.device))
    symbols = [corpus.symbols[token] for token in tokens]
    try:
        with warnings.catch_warnings(), waiting("drawing"):
            # matplotlib warns once for each character that its font lacks, and draws a box for it.
            warnings.filterwarnings("ignore", r"Glyph .* missing from font", UserWarning)
            saved = viz.save(viz.plot_layers(maps, symbols, title="attention in the demo"), path)
        print(f"\nattention heatmap: {saved}")
    except OSError as error:
        raise CommandError(f"--out {path}: cannot write: {error.strerror or error}") from error
