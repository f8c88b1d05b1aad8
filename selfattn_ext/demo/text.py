"""Text to train on, as numbers: a file, or the documentation that comes with Python."""

from __future__ import annotations

import builtins
import codecs
import inspect
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from selfattn_ext.terminal import CommandError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
MAX_SYMBOLS = 256
HELD_OUT_FRACTION = 0.05


@dataclass(frozen=True)
class Text:
    content: str
    origin: str  # where it was found, for people


def from_file(path: Path) -> Text:
    """Reads a file in UTF-8, or in UTF-16 if it starts with that encoding's mark.

    A few bytes that are not UTF-8, such as the umlauts of a file in Latin-1, become replacement characters.

    Raises:
        CommandError: the file cannot be read, or is not text in these encodings.
    """
    try:
        found = path.read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read the text file {path}: {error.strerror or error}") from error
    marked = found.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    content = found.decode("utf-16" if marked else "utf-8-sig", errors="replace")
    content = content.replace("\r\n", "\n").replace("\r", "\n")
    control = sum(symbol < " " and not symbol.isspace() for symbol in content)
    if "\0" in content or 2 * content.count(UNKNOWN) > len(content) or 10 * control > len(content):
        raise CommandError(f"{path} is not a text file in UTF-8, or in UTF-16 with a byte order mark")
    return Text(content, str(path))


def from_python() -> Text:
    """Returns the language reference that pydoc's help() shows, or the docstrings of the built-in types.

    The reference is about half a million characters in every CPython, but some distributions strip it from
    small images. The docstrings (about 60,000 characters) are compiled into every interpreter.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return Text(_builtin_docstrings(), "the docstrings of Python's built-in types")
    return Text(
        "\n\n".join(topics[name] for name in sorted(topics)), "the language reference of Python's help()"
    )


def _builtin_docstrings() -> str:
    found: dict[str, None] = {}  # an ordered set, as many methods inherit their docstring
    for _, value in sorted(vars(builtins).items()):
        members = [member for _, member in sorted(vars(value).items())] if inspect.isclass(value) else []
        for thing in [value, *members]:
            if callable(thing):
                found[inspect.getdoc(thing) or ""] = None
    return "\n\n".join(filter(None, found))


class Corpus:
    """A text as symbol numbers, split into a training part and a held-out tail.

    The vocabulary is the most frequent MAX_SYMBOLS - 1 characters and, if the text has more, one symbol for
    all others, so that a text in any script gives a small output layer. All tensors are on the CPU, even if
    torch's default device is another.

    Args:
        text: the text to train on.
        context: length of a training sequence.

    Raises:
        CommandError: the text is too short to hold out two sequences of that length.
    """

    def __init__(self, text: Text, context: int) -> None:
        minimum = 4 * (context + 1)
        if len(text.content) < minimum:
            raise CommandError(
                f"the text of {text.origin} has {len(text.content)} characters; "
                f"training with a context of {context} needs at least {minimum}"
            )
        counts = Counter(text.content)
        if len(counts) > MAX_SYMBOLS:
            kept = {symbol for symbol, _ in counts.most_common(MAX_SYMBOLS - 1)} | {UNKNOWN}
        else:
            kept = set(counts)
        self.symbols = sorted(kept)
        self._number = {symbol: number for number, symbol in enumerate(self.symbols)}
        self.context = context
        encoded = self.encode(text.content)
        held_out = max(context + 1, int(len(encoded) * HELD_OUT_FRACTION))
        self.training, self.held_out = encoded[:-held_out], encoded[-held_out:]

    def encode(self, text: str) -> Tensor:
        """Returns the symbol numbers of a string, int64 (length,)."""
        other = self._number.get(UNKNOWN, 0)
        numbers = [self._number.get(symbol, other) for symbol in text]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def decode(self, numbers: Tensor) -> str:
        """Returns the string of symbol numbers (length,)."""
        return "".join(self.symbols[number] for number in numbers.tolist())

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draws training sequences; returns them and the symbols that follow, int64 (size, context) each."""
        starts = torch.randint(len(self.training) - self.context, (size,), generator=generator, device="cpu")
        return self._sequences(self.training, starts)

    def held_out_batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Returns up to ``size`` evenly spread held-out sequences, always the same, in batch()'s form."""
        last = len(self.held_out) - self.context - 1
        starts = torch.linspace(0, last, min(size, last + 1), device="cpu").long()
        return self._sequences(self.held_out, starts)

    def prompt(self, length: int) -> Tensor:
        """Returns a prompt, int64 (length,): the held-out line that begins with the most letters."""
        text = self.decode(self.held_out)
        last = len(text) - length
        starts = [index + 1 for index, symbol in enumerate(text) if symbol == "\n" and index < last]
        best = max(starts or [0], key=lambda start: sum(map(str.isalpha, text[start : start + length])))
        return self.held_out[best : best + length]

    def _sequences(self, source: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        positions = starts[:, None] + torch.arange(self.context, device="cpu")
        return source[positions], source[positions + 1]
