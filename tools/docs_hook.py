"""What mkdocs.yml asks of the pages: README.md is the home page, and links to files outside docs/ must exist.

The site has no such files, so that a link to one becomes its path in the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# Code, in which nothing is a link, or a link to a file.
LINK = re.compile(r"^```.*?^```|`[^`\n]+`(?!\])|(?<!!)\[([^\]]+)\]\((?![a-z]+:|#)([^)#\s]+)(?:#[^)]*)?\)", re.S | re.M)


def on_files(files: Any, config: Any) -> Any:
    """README.md becomes the page index.md."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=re.sub(r"\]\(docs/", "](", text)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links out of docs/ as paths; raises PluginError where there is no such file."""
    folder = ROOT if page.file.src_uri == "index.md" else (ROOT / "docs" / page.file.src_uri).parent

    def inside(match: re.Match[str]) -> str:
        words, target = match.groups()
        if target is None or files.get_file_from_path(_joined(page.file.src_uri, target)):
            return match.group(0)
        path = (folder / target).resolve()
        if not path.exists():
            raise PluginError(f"{page.file.src_uri}: {target} does not exist")
        return f"{words} (`{path.relative_to(ROOT)}`)" if path.name not in words else f"`{path.relative_to(ROOT)}`"

    return LINK.sub(inside, markdown)


def _joined(page: str, target: str) -> str:
    """A link's target as seen from docs/."""
    base = (ROOT / "docs" / page).parent / target
    resolved = base.resolve()
    docs = ROOT / "docs"
    return resolved.relative_to(docs).as_posix() if resolved.is_relative_to(docs) else ""
