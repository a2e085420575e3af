"""The report of a run as one HTML file. Opening it fetches nothing and executes no text of a model.

Vega draws the charts; its code comes with the package vl-convert-python. The Content-Security-Policy of the file allows
only its own scripts, by their hashes, and no connection. Rollouts are chunks of JSON, compressed by zlib, in base64.
The page decompresses a chunk when it shows it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from megatron_brorl import __version__
from megatron_brorl.files import nonfinite_to_none
from megatron_brorl.report.content import RecordedRun, Row, content
from megatron_brorl.rollout_log import FOLDER, LogEntry, filter_rows, one_line, prompt_sort_key, read_rollouts

FILES = Path(__file__).parent / "page"
SCRIPTS = ("dom.js", "charts.js", "sections.js", "browser.js")
MAX_MB = 5.0  # of a page, in 10^6 bytes
MAX_MOMENTS = 60  # in the list of moments
MAX_SIBLINGS = 16  # rollouts of one group
MAX_TOKENS = 32_768  # of these rollouts, except for the first right and the first wrong one
LISTS_SHARE = 0.25  # share of the size that lists of prompts may take
_ENTRY = 24  # bytes of "MOMENT/GROUP":CHUNK, at most
_EXCERPT = 160  # characters of a prompt in a list
_GROUP_KEYS = ("group", "prompt_id", "task", "rollouts", "right", "reward", "distinct", "tokens", "outcome", "trained")
_ROLLOUT_KEYS = ("sibling", "text", "answer", "reward", "right", "reason", "status", "finish", "tokens", "turns")
Unit = tuple[LogEntry, int, dict[str, Any]]  # moment, number of the group, content of the group on the page


def page(folders: Sequence[Path], megabytes: float = MAX_MB) -> str:
    """Return the HTML of a run's report, or of the comparison of several runs.

    megabytes: maximum size of the file. Rollouts fill the space that the other content leaves. The other content is
    never cut, even if it exceeds the limit. Raises UserError if a folder does not contain a run.
    """
    data, runs = content(folders)
    data |= {"version": __version__, "megabytes": megabytes}
    if len(runs) == 1:
        room = int(1e6 * megabytes) - len(render(data).encode()) - 2000  # reserve for the rest of "rollouts"
        changed = data["runs"][0]["change"]
        moved = {row["id"] for row in (*changed["solved"], *changed["lost"])} if changed else set()
        data["rollouts"] = embed(runs[0], moved, max(room, 0))
    return render(data)


def render(data: dict[str, Any]) -> str:
    """Return the page with this content."""
    environment = Environment(loader=FileSystemLoader(FILES), autoescape=True, undefined=StrictUndefined)
    scripts = [_inline(_vega()), _inline("\n".join(_file(name) for name in SCRIPTS))]
    return environment.get_template("page.html").render(
        title=" and ".join(run["name"] for run in data["runs"]),
        headlines=[(run["name"], run["verdict"]) for run in data["runs"]],
        style=Markup(_file("page.css")),
        scripts=[Markup(script) for script in scripts],
        policy=policy(scripts),
        content=htmlsafe_json_dumps(nonfinite_to_none(data), dumps=_dumps),
    )


def policy(scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy of a page with these scripts."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )


def embed(run: RecordedRun, moved: set[str], room: int) -> dict[str, Any]:
    """Return the rollouts that the page shows, in at most `room` bytes. The most informative ones come first.

    moved: ids of prompts that were newly solved or lost. Result: moments: kind, number and the chunk with the list of
    prompts. where: chunk by index of the moment and group. held, recorded: counts of groups and rollouts.
    """
    chunks = _Chunks(room)
    listed = []
    tables: dict[LogEntry, list[Row]] = {}
    # The last and the first evaluation, the last and the first step, then the others, latest first.
    evaluations, steps = run.of_kind("evaluation"), run.of_kind("step")
    ends = [*evaluations[-1:], *evaluations[:1], *steps[-1:], *steps[:1]]
    for moment in list(dict.fromkeys([*ends, *evaluations[::-1], *steps[::-1]]))[:MAX_MOMENTS]:
        rows = run.groups(moment).to_pylist()
        excerpts = _excerpts([g["prompt"] for g in rows], run.key("data", "template", ""))
        shown = [{key: g[key] for key in _GROUP_KEYS} | {"excerpt": e} for g, e in zip(rows, excerpts, strict=True)]
        number = chunks.add(shown, room=int(LISTS_SHARE * room) - (room - chunks.left))  # the rest of their share
        if number is None:
            break
        tables[moment] = rows
        listed.append({"kind": moment.kind, "number": moment.shown, "list": number})

    chunk_of: dict[str, int] = {}
    counts = {"groups": 0, "rollouts": 0}
    places = {moment: place for place, moment in enumerate(tables)}
    for moment, group, unit in _units(run, tables, moved):
        number = chunks.add(unit)
        if number is None:
            break
        chunk_of[f"{places[moment]}/{group}"] = number
        counts["groups"] += 1
        counts["rollouts"] += len(unit["rollouts"])
    recorded = [g["recorded"] for rows in tables.values() for g in rows if g["recorded"]]
    return {
        "moments": listed,
        "where": chunk_of,
        "chunks": chunks.texts,
        "held": counts,
        "recorded": {"groups": len(recorded), "rollouts": sum(recorded)},
        "moments_recorded": len(run.moments),
    }


class _Chunks:
    """Compressed pieces of JSON that fit into a number of bytes."""

    def __init__(self, room: int) -> None:
        self.texts: list[str] = []
        self.left = room

    def add(self, value: Any, room: int | None = None) -> int | None:
        """Add a chunk and return its number, or None if it does not fit. room: a second limit in bytes."""
        plain_text = _dumps(value).encode()
        text = base64.b64encode(zlib.compress(plain_text, level=6)).decode()
        size = len(text) + 3 + _ENTRY  # 3 for quotes and comma
        if size > self.left or (room is not None and size > room):
            return None
        self.left -= size
        self.texts.append(text)
        return len(self.texts) - 1


def _units(run: RecordedRun, tables: Mapping[LogEntry, list[Row]], moved: set[str]) -> Iterator[Unit]:
    """Yield the groups of newly solved or lost prompts, then all groups by moment."""
    moved_first = [(m, True) for m in tables if m.kind == "evaluation"][:2] if moved else []
    yielded: set[tuple[LogEntry, int]] = set()
    for moment, only_moved in [*moved_first, *((m, False) for m in tables)]:
        selected = [g for g in tables[moment] if g["recorded"] and (moment, g["group"]) not in yielded]
        if only_moved:
            selected = [g for g in selected if g["prompt_id"] in moved]
        selected.sort(key=lambda g: (prompt_sort_key(g["prompt_id"]), g["group"]))
        yielded |= {(moment, g["group"]) for g in selected}
        if not selected:
            continue
        rollouts: dict[int, list[Row]] = {}
        recorded = read_rollouts(run.folder / FOLDER, moment)
        for row in filter_rows(recorded, "group", [g["group"] for g in selected]).to_pylist():
            rollouts.setdefault(row["group"], []).append(row)
        for g in selected:
            chosen = [_rollout(r) for r in select_siblings(rollouts.get(g["group"], []))]
            yield moment, g["group"], {"prompt": g["prompt"], "reference": g["reference"], "rollouts": chosen}


def select_siblings(rollouts: Sequence[Row], most: int = MAX_SIBLINGS, tokens: int = MAX_TOKENS) -> list[Row]:
    """Return at most `most` rollouts of a group, half of them right and half wrong if there are enough of both.

    They have at most `tokens` tokens in total. The first right and the first wrong one are always included.
    """
    right, wrong = ([r for r in rollouts if r["right"] is verdict] for verdict in (True, False))
    right_end = min(len(right), max(most // 2, most - len(wrong)))
    chosen = [*right[:1], *wrong[:1]]
    left = tokens - sum(r["tokens"] for r in chosen)
    for r in sorted([*right[1:right_end], *wrong[1 : most - right_end]], key=lambda r: r["sibling"]):
        left -= r["tokens"]
        if left < 0:
            break
        chosen.append(r)
    return sorted(chosen, key=lambda r: r["sibling"])


def _rollout(r: Row) -> dict[str, Any]:
    parts = [[name, _short(value)] for name, value in r["parts"] or []]
    return {**{key: r[key] for key in _ROLLOUT_KEYS}, "parts": parts, "advantage": _short(r["advantage"])}


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _excerpts(prompts: Sequence[str | None], template: str) -> list[str | None]:
    """Return the prompts without the head of data.template and without the first lines that all share (few-shot)."""
    head = template.partition("{prompt}")[0]
    texts = [None if p is None else p.removeprefix(head) for p in prompts]
    lines = [text.splitlines() for text in {*texts} if text]
    shared = sum(1 for _ in takewhile(lambda row: len({*row}) == 1, zip(*lines, strict=False))) if lines[1:] else 0
    return [t and one_line("\n".join(t.splitlines()[shared:]) or t, _EXCERPT) for t in texts]


def _dumps(value: Any, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _inline(script: str) -> str:
    """Return the script with "</script" and "<!--" escaped, so that they cannot end or confuse the script element.

    The escapes do not change the meaning of JavaScript strings and regular expressions. An HTML parser normalizes line
    endings to LF; this function does the same, so that the hash in the policy matches.
    """
    text = script.replace("\r\n", "\n").replace("\r", "\n")
    return text.replace("</script", r"<\/script").replace("<!--", r"<\!--")


def _file(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")


@functools.cache
def _vega() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script. Bundling takes about two seconds."""
    import vl_convert

    bundle: Any = vl_convert.javascript_bundle  # The type stub lacks the default of its argument.
    return str(bundle())
