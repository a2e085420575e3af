"""Check the links of the pages in the root and in docs, including headings. `make docs` builds the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.S | re.M)
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)]*))?\)")


def headings(page: Path) -> set[str]:
    """Return the anchors of headings that GitHub and mkdocs generate in the same way."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.M)
    words = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in titles]
    return {re.sub(r"\s", "-", w) for w in words} & {re.sub(r"[\s-]+", "-", w) for w in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_have_a_target(page):
    for target, anchor in LINK.findall(CODE.sub("", page.read_text())):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{target} does not exist"
        assert not anchor or anchor in headings(file), f"{target} has no heading {anchor}: {sorted(headings(file))}"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 750
