"""The report of a run as one HTML file: nothing is fetched when it is opened, and nothing that a model wrote is run.

Charts are drawn by Vega, whose code comes with the package vl-convert-python. The file's own policy (CSP) allows the
scripts that it was made with, known by their hashes, and no connection anywhere but, of a page that follows a running
run, to where it came from.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from megatron_brorl import __version__
from megatron_brorl.report.content import content
from megatron_brorl.report.embedded import embed

FILES = Path(__file__).parent / "page"
SCRIPTS = ("dom.js", "charts.js", "sections.js", "spent.js", "prompts.js", "browser.js", "app.js")
MOST_MB = 5.0  # of a page, in millions of bytes


def page(folders: Sequence[Path], megabytes: float = MOST_MB, live: bool = False) -> str:
    """The HTML of a run's report, or of the comparison of several.

    megabytes: that the file takes at most, of which rollouts get what the rest leaves; figures alone may take more.
    live: it asks where it came from for what is new. Raises UserError where a folder holds no run.
    """
    return render(page_content(folders, megabytes), live)


def page_content(folders: Sequence[Path], megabytes: float = MOST_MB) -> dict[str, Any]:
    """All that the page shows. Raises UserError where a folder holds no run."""
    found, runs, held_out = content(folders)
    found |= {"version": __version__, "megabytes": megabytes}

    # Of one run the rollouts take what is left.
    if len(runs) == 1:
        room = int(1e6 * megabytes) - len(render(found, False).encode()) - 2000
        found["rollouts"] = embed(runs[0], held_out[0], max(room, 0))
    return found


def render(found: dict[str, Any], live: bool) -> str:
    """The page with this content."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FILES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    # A script that closed its own element early would end it there.
    scripts = [_inline(_vega()), _inline("\n".join(_file(name) for name in SCRIPTS))]
    return environment.get_template("page.html").render(
        title=" and ".join(run["name"] for run in found["runs"]),
        headlines=[(run["name"], run["verdict"]) for run in found["runs"]],
        style=Markup(_file("page.css")),
        scripts=[Markup(script) for script in scripts],
        policy=policy(scripts, live),
        content=htmlsafe_json_dumps(plain({**found, "live": live}), dumps=_dumps),
    )


def policy(scripts: Sequence[str], live: bool) -> str:
    """The Content-Security-Policy of a page with these scripts."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{own}'" for own in hashes)
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def plain(value: Any) -> Any:
    """The value as JSON has it: numbers that are not finite become null."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _dumps(value: Any, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _inline(script: str) -> str:
    """The script as it may stand in an element: in strings and patterns, the only places of these, \\/ is /."""
    text = script.replace("\r\n", "\n").replace("\r", "\n")
    return text.replace("</script", r"<\/script").replace("<!--", r"<\!--")


def _file(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")


@functools.cache
def _vega() -> str:
    """Vega, Vega-Lite and vega-embed in one, as globals of these names; making it takes about two seconds."""
    import vl_convert

    bundle: Any = vl_convert.javascript_bundle  # its stub asks for an argument that has a default
    return str(bundle())
