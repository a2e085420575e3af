"""Hook of mkdocs.yml: add pages of the repository's root to the site, and generate two pages and some tables.

A link to a file outside of docs/ is replaced by the path, because the site does not contain the file. A link to a file
that does not exist is an error.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from megatron_brorl.cli.config import bounds, description, section_description, to_toml, type_text
from megatron_brorl.config.foreign_keys import FOREIGN_KEYS
from megatron_brorl.config.load import json_schema, keys
from megatron_brorl.tracking import metric_docs

ROOT = Path(__file__).resolve().parent.parent
# Pages that are not in docs/, and their names in the site.
ROOT_PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "security_policy.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# Matches a code block or inline code, which `on_page_markdown` does not change, or a relative link to a file.
LINK = re.compile(r"^```.*?^```|`[^`\n]+`(?!\])|(?<!!)\[([^\]]+)\]\((?![a-z]+:|#)([^)#\s]+)(?:#[^)]*)?\)", re.S | re.M)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root and the generated pages."""
    texts = {name: (ROOT / source).read_text(encoding="utf-8") for source, name in ROOT_PAGES.items()}
    pages = {name: re.sub(r"\]\(docs/", "](", text) for name, text in texts.items()}
    for name, text in {**pages, "configuration.md": configuration(), "metrics.md": metrics()}.items():
        files.append(File.generated(config, name, content=text))
    return files


def configuration() -> str:
    """Return the page of all keys of a run's TOML file."""
    lines = [
        "# Configuration",
        "",
        "All keys of the TOML file of a run. `brorl config WORD` prints the same text, `brorl config --schema` a JSON",
        "Schema for editors.",
    ]
    for name in json_schema()["properties"]:
        rows = []
        for path, key in keys().items():
            if path.partition(".")[0] == name:
                default = f"`{to_toml(key['default'])}`" if "default" in key else ""
                cells = (f"`{path}`", type_text(key), default, ", ".join(bounds(key)), description(path))
                rows.append([cell.replace("|", "\\|") for cell in cells])
        lines += _section(name, section_description(name), ["key", "type", "default", "bound", "meaning"], rows)
    return "\n".join(lines) + "\n"


def foreign_keys() -> str:
    """Return tables of all known keys of other trainers, each with our key and the conversion of its value."""
    lines = []
    for trainer, table in FOREIGN_KEYS.items():
        rows = [[f"`{foreign_key}`", answer] for foreign_key, answer in table.items()]
        lines += _section(f"All keys of {trainer} that errors explain", "", [trainer, "here"], rows)
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Return the page of all metrics of metrics.jsonl and summary.json."""
    lines = [
        "# Metrics",
        "",
        "The metrics of a run: `metrics.jsonl` has a line per step, `summary.json` the result. `brorl metrics WORD`",
        "prints the same. In `metrics.jsonl`, `step` counts from 0, wall-clock values are under `time`, and a value",
        "that is not finite is null and listed under `nonfinite`. Metrics of features that a run does not use are",
        "absent. TensorBoard and other trackers of `run.log` show them by group. All but those under `time` are the",
        "same in every run of one configuration and seed. Shares are in [0, 1]; `{k}` stands for a number or a name.",
    ]
    for section in metric_docs.sections():
        under = " Under `time`." if section.file == "time" else ""
        group = f" Group `{section.group}`." if section.group else ""
        rows = [[f"`{m.name}`", m.unit, m.meaning, m.bad] for m in section.metrics]
        about = section.about + under + group
        lines += _section(section.title, about, ["metric", "unit", "meaning", "bad values"], rows)
    return "\n".join(lines) + "\n"


def _section(title: str, about: str, head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a heading, a text and a table."""
    table = [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]
    return ["", f"## {title}", "", *([about, ""] if about else []), *table]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links to files outside of docs/ by paths. Raises PluginError if a file does not exist."""
    name = page.file.src_uri
    folder = ROOT if name in ROOT_PAGES.values() else (ROOT / "docs" / name).parent

    def replaced(match: re.Match[str]) -> str:
        words, target = match.groups()
        if target is None or files.get_file_from_path(_path_in_docs(name, target)):
            return match.group(0)
        path = (folder / target).resolve()
        if not path.exists():
            raise PluginError(f"{name}: {target} does not exist")
        shown = str(path.relative_to(ROOT))
        if shown in ROOT_PAGES:
            site_path = os.path.relpath(ROOT_PAGES[shown], os.path.dirname(name))
            return match.group(0).replace(f"]({target}", f"]({site_path}")
        return f"{words} (`{shown}`)" if path.name not in words else f"`{shown}`"

    return LINK.sub(replaced, markdown) + (foreign_keys() if name == "coming_from.md" else "")


def _path_in_docs(page: str, target: str) -> str:
    """Return a link's target relative to docs/, or "" if it is outside."""
    docs = ROOT / "docs"
    path = (docs / page).parent.joinpath(target).resolve()
    return path.relative_to(docs).as_posix() if path.is_relative_to(docs) else ""
