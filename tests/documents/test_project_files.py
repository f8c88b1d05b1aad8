"""What hosts and tools read of the project: workflows, templates, citation, hooks.

make lint compares them with their schemas.
"""

from __future__ import annotations

import re

import pytest
from pages import ROOT, text_of

from selfattn_ext.build import sources

WORKFLOWS = [f".github/workflows/{path.name}" for path in sorted((ROOT / ".github" / "workflows").iterdir())]
TEMPLATES = [".github/ISSUE_TEMPLATE/fault.yml", ".github/PULL_REQUEST_TEMPLATE.md", ".github/SECURITY.md"]
PINNED = re.compile(r'"([\w-]+)==([\w.]+)"')


def test_hooks_before_a_commit_have_the_versions_of_make_lint() -> None:
    extra = re.search(r"^lint = \[(.*?)\]", text_of("pyproject.toml"), re.M | re.S)
    assert extra is not None
    wanted = dict(PINNED.findall(extra[1]))
    hooks = text_of(".pre-commit-config.yaml")
    assert {"ruff", "mypy", "clang-format"} <= wanted.keys()
    assert {*PINNED.findall(hooks)} == {*wanted.items()} - {("mypy", wanted["mypy"])}
    assert re.search(r"^ +entry: mypy$", hooks, re.M)  # it has to see the installed torch


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_workflows_call_commands_that_exist(workflow: str) -> None:
    text = text_of(workflow)
    named = re.findall(r"run: make ([\w-]+)$", text, re.M)
    named += [name for listed in re.findall(r"target: \[(.+)\]", text) for name in listed.split(", ")]
    targets = re.findall(r"^([\w-]+):(?!=)", text_of("Makefile"), re.M)
    assert named
    assert sorted({*named} - {*targets}) == []
    assert all((ROOT / path).is_file() for path in re.findall(r"run: (\.\S+)$", text, re.M))


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_workflows_name_the_very_content_of_what_they_use(workflow: str) -> None:
    """A tag can be moved to another commit; the hash of a commit cannot."""
    uses = re.findall(r"uses: (.+)$", text_of(workflow), re.M)
    assert uses
    assert [name for name in uses if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", name)] == []


@pytest.mark.parametrize("template", TEMPLATES)
def test_reports_ask_for_what_info_prints(template: str) -> None:
    assert "python -m selfattn_ext info" in text_of(template)


def test_the_citation_is_of_this_version() -> None:
    fields = dict(re.findall(r"^(\w[\w-]*): (\S.*)$", text_of("CITATION.cff"), re.M))
    project = dict(re.findall(r'^(\w+) = "(.*)"$', text_of("pyproject.toml"), re.M))
    assert fields["version"] == sources.version()
    assert (fields["title"], fields["license"]) == (project["name"], project["license"])


@pytest.mark.parametrize("file", [*WORKFLOWS, *TEMPLATES, "CITATION.cff", ".pre-commit-config.yaml"])
def test_no_address_is_guessed(file: str) -> None:
    """Nobody knows yet where the repository will be."""
    assert "://" not in text_of(file)
