"""Sphinx's settings for the documentation that ``make docs`` builds.

The repository itself is the folder of sources, so that links between pages mean the same here and where the
Markdown is read as it is. hooks.py in this folder does what Sphinx has no setting for.
"""

from __future__ import annotations

import sys
from pathlib import Path

import selfattn_ext

sys.path.insert(0, str(Path(__file__).parent))

project = "selfattn_ext"
author = "selfattn_ext authors"
copyright = author
version = release = selfattn_ext.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "hooks",
]

root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/README.md", "simulators/**.md"]
include_patterns += [".github/SECURITY.md", ".github/CODE_OF_CONDUCT.md"]
# Folders that are not walked through at all.
exclude_patterns = [
    ".git",
    ".[!g]*",
    "build",
    "dist",
    "csrc",
    "tests",
    "scripts",
    "selfattn_ext",
    "**/__pycache__",
]

# Blocks that name no language are commands and messages.
highlight_language = "none"
# GitHub's anchors of headings.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
# transformers is no requirement of the documentation.
autodoc_mock_imports = ["transformers"]
napoleon_numpy_docstring = False

html_theme = "pydata_sphinx_theme"
html_title = f"selfattn_ext {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
# These have no pages below them that a sidebar could list.
html_sidebars = {page: [] for page in ("README", "docs/install", "docs/five-minutes", "search", "genindex")}
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navigation_with_keys": False,
    "navbar_align": "left",
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
}
