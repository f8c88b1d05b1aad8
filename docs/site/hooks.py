"""What the documentation needs beyond Sphinx's settings.

Pages stay plain Markdown. What differs on the site is added while they are read: pictures that follow its
light and dark modes, links to folders, and the order of pages. Arguments of functions become places that
links and the search can find, and names of torch lead to torch's documentation.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).resolve().parents[2]

_analyze = ModuleAnalyzer.analyze

#: The pages after a page, in the order in which a reader learns; those that do not exist are left out.
AFTER = {
    "README": [
        "docs/install",
        "docs/five-minutes",
        "docs/site/guides",
        "docs/reference/index",
        "docs/site/how-it-works",
        "CONTRIBUTING",
    ],
    "CONTRIBUTING": [
        "benchmarks/README",
        "simulators/README",
        "simulators/amx/README",
        "simulators/avx512/README",
        "simulators/ptx_machine/README",
        ".github/SECURITY",
        ".github/CODE_OF_CONDUCT",
    ],
}

_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img src="(?P<light>[^"]+)"[^>]*?alt="(?P<alt>[^"]*)">\s*</picture>',
    re.DOTALL,
)
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)\)")
#: A link whose words are the name of the page.
_NAMED = re.compile(r"\[(?:[\w-]+/)*[\w-]+\.md\](?=\((?!\w+:))")

#: Pages of torch's documentation for the names that docstrings mention. Others get no link.
TORCH = "https://docs.pytorch.org/docs/stable/"
TORCH_PAGES = {
    **{
        f"torch.{name}": f"generated/torch.{name}.html"
        for name in (
            "manual_seed",
            "nn.Module",
            "nn.MultiheadAttention",
            "nn.TransformerEncoderLayer",
            "nn.attention.bias.CausalBias",
            "nn.attention.sdpa_kernel",
            "nn.functional.scaled_dot_product_attention",
            "set_float32_matmul_precision",
            "use_deterministic_algorithms",
        )
    },
    "Tensor": "tensors.html#torch.Tensor",
    "torch.Tensor": "tensors.html#torch.Tensor",
    "torch.autocast": "amp.html#torch.autocast",
    "torch.device": "tensor_attributes.html#torch.device",
    "torch.dtype": "tensor_attributes.html#torch.dtype",
    "torch.nested": "nested.html",
    "torch.nn.attention.flex_attention.AuxRequest": "nn.attention.flex_attention.html",
    "torch.nn.attention.flex_attention.BlockMask": "nn.attention.flex_attention.html",
    "torch.nn.attention.flex_attention.flex_attention": "nn.attention.flex_attention.html",
}


def read_markdown(app: Sphinx, docname: str, source: list[str]) -> None:
    """Changes the text of a page as the site needs it."""
    page = ROOT / f"{docname}.md"
    text = _PICTURE.sub(_two_pictures, source[0])
    text = _LINK.sub(lambda link: _without_folder(link, page), text)
    text = _NAMED.sub("[]", text)  # the site shows the page's title there
    pages = [f"/{name}" for name in AFTER.get(docname, []) if (ROOT / f"{name}.md").is_file()]
    if pages:
        text += "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"
    source[0] = text


def _two_pictures(found: re.Match[str]) -> str:
    return "\n\n".join(
        f"```{{image}} {found[mode]}\n:class: only-{mode}\n:alt: {' '.join(found['alt'].split())}\n```"
        for mode in ("light", "dark")
    )


def _without_folder(link: re.Match[str], page: Path) -> str:
    """A link to a folder leads to its files in the list of all files."""
    target = (page.parent / link[1]).resolve()
    if not target.is_dir():
        return link[0]
    folder = target.relative_to(ROOT).as_posix()
    anchor = re.sub(r"[^\w-]", "", folder)
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)
    return f"]({up}docs/files.md#{anchor})"


def enter_arguments(app: Sphinx, domain: str, kind: str, content: addnodes.desc_content) -> None:
    """Makes every argument a place of its own, which the search finds by its name."""
    signature = content.parent.next_node(addnodes.desc_signature)
    if domain != "py" or signature is None or not signature["ids"]:
        return
    owner = signature["ids"][0]
    python: Any = app.env.get_domain("py")
    for field in content.findall(nodes.field):
        label, _, names = field[0].astext().partition(" ")
        paragraph = field[1].next_node(nodes.paragraph)
        if label != "param" or paragraph is None:
            continue
        for name in names.replace("\\", "").split(", "):
            place = f"{owner}.{name.strip('*')}"
            paragraph.insert(0, nodes.target("", "", ids=[place]))
            python.note_object(place, "argument", place, location=signature)


def find_torch(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Node
) -> nodes.reference | None:
    """The page of torch's documentation for a name of torch."""
    page = TORCH_PAGES.get(str(node.get("reftarget", "")))
    return page and nodes.reference("", "", content, refuri=TORCH + page, internal=False)


def without_any(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Leaves out annotations of results that tell nothing; the docstring's "Returns" does."""
    tells = returns not in (None, "None", "~typing.Any") and not re.search(r"\._", returns)
    return signature, returns if tells else None


def without_overloads(analyzer: ModuleAnalyzer) -> None:
    """Signatures are those of the functions; overloads repeat them for type checkers, per kind of result."""
    _analyze(analyzer)
    analyzer.overloads.clear()


def put_front_page(app: Sphinx, error: Exception | None) -> None:
    """The README is also the page that a browser opens for the folder."""
    if error is None and app.builder.name == "html":
        shutil.copyfile(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Sphinx) -> dict[str, Any]:
    ModuleAnalyzer.analyze = without_overloads
    app.connect("source-read", read_markdown)
    app.connect("object-description-transform", enter_arguments)
    app.connect("missing-reference", find_torch)
    app.connect("autodoc-process-signature", without_any)
    app.connect("build-finished", put_front_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
