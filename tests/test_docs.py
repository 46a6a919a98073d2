"""The documents point at what is there."""

import re
from pathlib import Path

import pytest

from lockstep import config

PAGES = [config.PROJECT / "README.md", *sorted((config.PROJECT / "docs").glob("*.md"))]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:]+)(?:#(L?)([\w-]+))?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_lines_that_hold_what_they_name(page: Path) -> None:
    links = LINK.findall(page.read_text())
    assert links
    for text, target, is_line, anchor in links:
        path = (page.parent / target).resolve()
        assert path.exists(), target
        if is_line:
            line = path.read_text().splitlines()[int(anchor) - 1]
            name = text.strip("`")
            assert re.search(rf"(def|class) {name}\b", line), f"{name} is not at {target}#L{anchor}"
        elif text.startswith("`test_"):
            name = text.strip("`")
            assert f"def {name}(" in path.read_text(), f"{target} has no {name}"
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{target}#{anchor}"


def test_the_readme_names_every_option_of_every_group() -> None:
    readme = (config.PROJECT / "README.md").read_text()
    for group in (path for path in (config.PROJECT / "conf").iterdir() if path.is_dir()):
        (row,) = re.findall(rf"^\| `{group.name}` \| (.*?) \|", readme, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", row)) == {path.stem for path in group.glob("*.yaml")}, group.name
