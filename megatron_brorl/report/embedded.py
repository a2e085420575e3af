"""The rollouts that a page carries: compressed, the most telling first, until the room that they are given is full.

A chunk is JSON, compressed by zlib, in base64: the page opens one when somebody looks at what it holds.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron_brorl.record.files import Moment, only, prompt_order
from megatron_brorl.record.text import one_line
from megatron_brorl.report.held_out import Asked, Evaluation
from megatron_brorl.report.run_files import Row, RunFiles

MOST_MOMENTS = 60  # that are listed; reading more takes long
MOST_SIBLINGS = 16  # of a prompt at one moment
MOST_TOKENS = 32_768  # of them together, but for the first right and the first wrong one
LISTS_SHARE = 0.25  # of the room that lists of prompts may take
_CHUNK = 100_000  # characters of JSON, more or less
_ENTRY = 32  # bytes of "MOMENT/GROUP":[CHUNK,PLACE], at most
_EXCERPT = 160  # characters of a prompt in a list
_OF_GROUPS = ("group", "prompt_id", "verifier", "rollouts", "right", "distinct", "tokens", "outcome", "trained")
_OF_ROLLOUTS = ("sibling", "text", "answer", "reward", "right", "reason", "status", "finish", "tokens")


class Chunks:
    """What fits into so many bytes of a page."""

    def __init__(self, room: int) -> None:
        self.texts: list[str] = []
        self.left = room

    def add(self, value: Any, entries: int, room: int | None = None) -> int | None:
        """The chunk's number; None: it does not fit, into what is left or into `room` bytes.

        entries: that lead to what it holds, which take room too.
        """
        plain = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        text = base64.b64encode(zlib.compress(plain, 6)).decode()
        size = len(text) + 3 + _ENTRY * entries  # with quotes and a comma
        if size > self.left or (room is not None and size > room):
            return None
        self.left -= size
        self.texts.append(text)
        return len(self.texts) - 1


def embed(run: RunFiles, found: Sequence[Evaluation], room: int) -> dict[str, Any]:
    """What the page's browser shows, in at most `room` bytes.

    moments: kind, number and list, the chunk with its prompts (rows of _OF_GROUPS with an excerpt). where: by moment
    (its place) and group: [chunk, place in it], each with prompt, reference and rollouts. counts: of groups and
    rollouts that are there, and those that are recorded.
    """
    # Lists of prompts, of as many moments as there is room for.
    chunks, listed = Chunks(room), []
    tables: dict[Moment, list[Row]] = {}  # their groups, as recorded
    for moment in _by_worth(run)[:MOST_MOMENTS]:
        rows = run.groups(moment).to_pylist()
        # An excerpt of the prompt stands in for its text, which comes with its rollouts.
        own = [{**{key: g[key] for key in _OF_GROUPS}, "excerpt": _excerpt(g)} for g in rows]
        number = chunks.add(own, 2, int(LISTS_SHARE * room) - (room - chunks.left))
        if number is None:
            break  # full
        tables[moment] = rows
        listed.append({"kind": moment.kind, "number": moment.number, "list": number})

    # Rollouts, in pieces that are worth opening at once, from the most telling one on.
    where: dict[str, list[int]] = {}
    held = {"groups": 0, "rollouts": 0}
    places = {moment: place for place, moment in enumerate(tables)}
    for piece in _pieces(_units(run, tables, _moved(found))):
        number = chunks.add([unit for _, _, unit in piece], len(piece))
        if number is None:
            break  # full
        for place, (moment, group, unit) in enumerate(piece):
            # By the number of the group: a prompt may have several.
            where[f"{places[moment]}/{group}"] = [number, place]
            held["groups"] += 1
            held["rollouts"] += len(unit["rollouts"])

    # What a reader is told that is not here.
    recorded = [(g["recorded"] > 0, g["recorded"]) for rows in tables.values() for g in rows]
    return {
        "moments": listed,  # in order of worth
        "where": where,
        "chunks": chunks.texts,
        "held": held,
        "recorded": {"groups": sum(any_ for any_, _ in recorded), "rollouts": sum(count for _, count in recorded)},
        "moments_recorded": len(run.moments),  # of which the page may list fewer
    }


def _moved(found: Sequence[Evaluation]) -> set[str]:
    """Ids of prompts that are right at least once in one of the first and the last evaluation alone."""
    recorded = [e.prompts for e in found if e.prompts]
    if len(recorded) < 2:
        return set()
    none = Asked(0, 1, "", 0.0)
    first, last = recorded[0], recorded[-1]
    return {k[0] for k in {**first, **last} if bool(first.get(k, none).right) != bool(last.get(k, none).right)}


def _by_worth(run: RunFiles) -> list[Moment]:
    """The last and the first evaluation, the last and the first step, then the others, far from one another."""
    evaluations, steps = run.of_kind("evaluation"), run.of_kind("step")
    ends = [*evaluations[-1:], *evaluations[:1], *steps[-1:], *steps[:1]]
    inner = [*_halving(evaluations[1:-1]), *_halving(steps[1:-1])]
    return list(dict.fromkeys([*ends, *inner]))


def _halving(there: Sequence[Moment]) -> Iterator[Moment]:
    """The middle one, then those in the middles of what is left on either side."""
    open_parts = [there]
    while open_parts:
        part = open_parts.pop(0)
        if part:
            middle = len(part) // 2
            yield part[middle]
            open_parts += [part[:middle], part[middle + 1 :]]


def _units(
    run: RunFiles, tables: Mapping[Moment, list[Row]], moved: set[str]
) -> Iterator[tuple[Moment, int, dict[str, Any]]]:
    """(moment, group, what is shown of it): first of prompts that moved, at both ends, then moment by moment."""
    evaluations = [m for m in tables if m.kind == "evaluation"]
    passes = [(m, True) for m in evaluations[:2]] if moved else []
    passes += [(m, False) for m in tables]
    done: set[tuple[Moment, int]] = set()
    for moment, only_moved in passes:
        wanted = [g for g in tables[moment] if g["recorded"] and (moment, g["group"]) not in done]
        if only_moved:
            wanted = [g for g in wanted if g["prompt_id"] in moved]
        wanted.sort(key=lambda g: (prompt_order(g["prompt_id"]), g["group"]))
        done |= {(moment, g["group"]) for g in wanted}
        yield from _of_moment(run, moment, wanted)


def _of_moment(run: RunFiles, moment: Moment, wanted: list[Row]) -> Iterator[tuple[Moment, int, dict[str, Any]]]:
    if not wanted:
        return
    table = run.rollouts(moment)
    table = only(table, "group", [g["group"] for g in wanted]).drop_columns(["token_ids", "versions"])
    rollouts: dict[int, list[Row]] = {}
    for row in table.to_pylist():
        rollouts.setdefault(row["group"], []).append(row)
    for g in wanted:
        own = [_rollout(r) for r in telling(rollouts.get(g["group"], []))]
        yield moment, g["group"], {"prompt": g["prompt"], "reference": g["reference"], "rollouts": own}


def telling(rollouts: Sequence[Row], most: int = MOST_SIBLINGS, tokens: int = MOST_TOKENS) -> list[Row]:
    """At most so many siblings in their order, right and wrong ones half and half where there are enough of both.

    Of at most so many tokens together, but for the first right and the first wrong one, which are there in any case.
    """
    right, wrong = ([r for r in rollouts if r["right"] is verdict] for verdict in (True, False))
    of_right = min(len(right), max(most // 2, most - len(wrong)))
    firsts = [*right[:1], *wrong[:1]]
    others = sorted([*right[1:of_right], *wrong[1 : most - of_right]], key=lambda r: r["sibling"])

    # Long ones take the room of many.
    left = tokens - sum(r["tokens"] for r in firsts)
    chosen = firsts
    for r in others:
        left -= r["tokens"]
        if left < 0:
            break
        chosen.append(r)
    return sorted(chosen, key=lambda r: r["sibling"])


def _rollout(r: Row) -> dict[str, Any]:
    """For the page: numbers of four digits."""
    log_probs = r["log_probs"]
    return {
        **{key: r[key] for key in _OF_ROLLOUTS},
        "parts": [[name, _short(value)] for name, value in r["parts"] or []],
        "advantage": _short(r["advantage"]),
        "log_probs": None if log_probs is None else [_short(p) for p in log_probs],
    }


def _short(value: float | None) -> float | None:
    """None for what JSON does not hold."""
    return None if value is None or value != value or abs(value) == float("inf") else float(f"{value:.4g}")


def _excerpt(g: Row) -> str | None:
    return None if g["prompt"] is None else one_line(g["prompt"], _EXCERPT)


def _pieces(
    units: Iterable[tuple[Moment, int, dict[str, Any]]],
) -> Iterator[list[tuple[Moment, int, dict[str, Any]]]]:
    """In groups of about _CHUNK characters; one that is longer stands alone."""
    piece: list[tuple[Moment, int, dict[str, Any]]] = []
    size = 0
    for moment, group, unit in units:
        own = sum(len(r["text"]) + 12 * len(r["log_probs"] or []) + 200 for r in unit["rollouts"])
        if piece and size + own > _CHUNK:
            yield piece
            piece, size = [], 0
        piece.append((moment, group, unit))
        size += own
    if piece:
        yield piece
