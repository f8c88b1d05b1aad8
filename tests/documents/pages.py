"""The documents and their examples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
#: The documents' paths, relative to ROOT.
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
DOCUMENTS += [".github/SECURITY.md", ".github/CODE_OF_CONDUCT.md"]
DOCUMENTS += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS += [f"docs/reference/{path.name}" for path in sorted((ROOT / "docs" / "reference").glob("*.md"))]

_BLOCK = re.compile(r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```python\n(?P<code>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """An example in Python."""

    document: str
    line: int  # the number of its first line of code
    code: str
    reason: str | None  # the reason why it is not run

    def __str__(self) -> str:
        return f"{self.document} line {self.line}"

    def run(self) -> dict[str, Any]:
        """Executes the example, with the document's line numbers in tracebacks, and returns its names."""
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile("\n" * (self.line - 1) + self.code, str(ROOT / self.document), "exec"), names)
        return names


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str) -> list[Block]:
    """Returns the examples of a document, in order."""
    text = text_of(document)
    return [
        Block(document, text.count("\n", 0, match.start("code")) + 1, match["code"], match["reason"])
        for match in _BLOCK.finditer(text)
    ]
