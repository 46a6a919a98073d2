"""The documents point at what is there."""

import ast
import re
from pathlib import Path

import pytest

from lockstep import config

README = config.PROJECT / "README.md"
PAGES = [README, *sorted((config.PROJECT / "docs").glob("*.md"))]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:]+)(?:#([\w-]+))?\)")


def definitions(path: Path) -> set[str]:
    """Return the names of a Python file's functions, methods and classes."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def anchors(path: Path) -> set[str]:
    """Return the anchors of a Markdown file's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_define_what_they_name(page: Path) -> None:
    links = LINK.findall(page.read_text())
    assert links
    for text, target, anchor in links:
        path = (page.parent / target).resolve()
        assert path.exists(), target
        name = text.strip("`")
        if name.endswith(".py"):
            assert path.name == Path(name).name, f"{text} leads to {target}"
        elif path.suffix == ".py":
            assert name in definitions(path), f"{target} does not define {name}"
        if anchor:  # of a heading: line numbers do not outlive the next change
            assert path.suffix == ".md", f"{target}#{anchor}"
            assert anchor in anchors(path), f"{target}#{anchor}"


def test_the_readme_names_every_option_of_every_group() -> None:
    readme = README.read_text()
    for group in (path for path in (config.PROJECT / "conf").iterdir() if path.is_dir()):
        (row,) = re.findall(rf"^\| `{group.name}` \| (.*?) \|", readme, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", row)) == {path.stem for path in group.glob("*.yaml")}, group.name


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (config.PROJECT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"(?:`| {4})make ([a-z-]+)", page.read_text())}
    assert {"train", "compare", "test", "test-all", "test-versions"} <= named
    assert named <= targets


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 130
