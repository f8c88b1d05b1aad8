"""The documents' examples run, their links lead somewhere, and their lines are wrapped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pages import DOCUMENTS, ROOT, Block, blocks, text_of

_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")

INDEX = "docs/README.md"
BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]
#: The example that test_functions_page.py runs, to look at its picture.
ELSEWHERE = '"masks.png"'


def test_every_block_is_found() -> None:
    assert len(blocks("README.md")) >= 2
    assert len(BLOCKS) >= 40
    for document in DOCUMENTS:
        assert len(blocks(document)) == len(re.findall(r"^```python", text_of(document), re.M)), document


#: Words in examples that do not run on a GPU, and the reason.
OF_THE_CPU = {
    "backends.use": "forces a kernel of the CPU",
    "flex_attention": "computes on the CPU alone",
    "torch.export.load": "fails under torch.set_default_device of another device",
}


def with_marks(block: Block) -> Any:
    reason = next((why for words, why in OF_THE_CPU.items() if words in block.code), None)
    return block if reason is None else pytest.param(block, marks=pytest.mark.cpu_only(reason))


@pytest.mark.parametrize(
    "block", map(with_marks, [block for block in BLOCKS if ELSEWHERE not in block.code]), ids=str
)
def test_example(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if block.reason is None:
        block.run()
    else:
        test = re.search(r"tests/[\w/]+\.py", block.reason)
        assert test is not None, "an example that is not run must name the test that does the same"
        assert (ROOT / test[0]).is_file()


def headings(document: str) -> set[str]:
    """Returns the anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text_of(document), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links(document: str) -> None:
    for path, anchor in _LINK.findall(text_of(document)):
        target = ((ROOT / document).parent / path).resolve() if path else ROOT / document
        assert target.exists(), f"{document} links to {path}"
        if anchor:
            assert anchor in headings(str(target.relative_to(ROOT))), f"{document} links to {path}#{anchor}"


def linked_from(document: str) -> set[str]:
    """Returns the files that a document links to, as paths relative to ROOT."""
    folder = (ROOT / document).parent
    paths = {(folder / path).resolve() for path, _ in _LINK.findall(text_of(document)) if path}
    return {str(path.relative_to(ROOT)) for path in paths}


def test_the_index_links_to_every_document() -> None:
    """The README links to the index, the index to all documents, and the reference to its own pages."""
    assert INDEX in linked_from("README.md")
    linked = linked_from(INDEX) | linked_from("docs/reference/index.md")
    assert sorted({*DOCUMENTS} - {INDEX} - linked) == []


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) < 120


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != "CHANGELOG.md"])
def test_lines_are_wrapped(document: str) -> None:
    """Lines have at most 118 columns, except for tables, code, quoted messages and unbreakable words."""
    text = re.sub(
        r"^```.*?^```$|^<!--.*?-->$|^<details>.*?^</details>$", "", text_of(document), flags=re.M | re.S
    )
    long = [line for line in text.splitlines() if len(line) > 118]
    assert [line for line in long if not re.match(r"[|>]|    |\s*\S+$", line)] == []
