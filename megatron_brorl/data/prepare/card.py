"""The data card of a prepared file: what is in it, where it came from and what was left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_brorl.data.prepare.files import sha256
from megatron_brorl.data.prepare.prepare import CONTAMINATED, Counts, Job

_HITS = 50  # shown on the card; all are in the file of dropped rows


def data_card(job: Job, counts: Counts, command: str) -> str:
    """Markdown. command: as it was given, to do it again."""
    # What it is, and how to make it again.
    about = [
        ("set", f"{job.name}: {job.data_set.about}"),
        ("published at", job.data_set.home),
        ("licence", job.data_set.licence),
        ("meant for", "evaluation, not training" if job.data_set.evaluation else "training"),
        ("sha256", f"`{sha256(job.out)}`"),
    ]
    parts = [f"# Data card of {job.out.name}", f"`{command}`", _table(("", ""), about)]

    # Rows in, rows out, and the difference by its reasons.
    dropped = [(f"dropped: {reason}", count) for reason, count in sorted(counts.dropped.items())]
    rows = [("read", sum(counts.read.values())), *dropped, ("written", counts.kept)]
    parts += ["## Rows", _table(("", "rows"), rows), f"Every dropped row is listed in `{job.dropped.name}`."]

    # The files, so that others can tell whether theirs are the same.
    inputs = [(f"`{path}`", count, f"`{sha256(path)}`") for path, count in counts.read.items()]
    parts += ["## Inputs", _table(("file", "rows", "sha256"), inputs)]
    if job.tokenizer is not None and job.max_prompt_tokens:
        parts.append(f"Lengths in tokens by `{job.tokenizer.directory}`, at most {job.max_prompt_tokens}.")
    if job.evaluations:
        parts += _decontamination(job, counts)
    return "\n\n".join(parts) + "\n"


def _decontamination(job: Job, counts: Counts) -> list[str]:
    """Against what, and what was found."""
    # Rows of this set by the evaluation file that they share words with.
    files = dict.fromkeys(counts.evaluated, 0)
    for _, hit in counts.hits:
        files[Path(hit.where.rpartition(":")[0])] += 1

    parts = [
        "## Decontamination",
        f"A row is dropped ({CONTAMINATED}) where its problem shares {job.n} words in a row with one of an evaluation, "
        f"or is the whole of one that is shorter.",
        _table(
            ("evaluation", "problems", "rows dropped", "sha256"),
            [(f"`{path}`", counts.evaluated[path], hits, f"`{sha256(path)}`") for path, hits in files.items()],
        ),
    ]

    # The first of them in full: a rule is judged by what it drops.
    if counts.hits:
        parts.append(
            _table(
                ("row", "evaluation row", "shared words"),
                [(f"`{where}`", f"`{hit.where}`", hit.words) for where, hit in counts.hits[:_HITS]],
            )
        )
    # A card is read; the file has them all.
    if len(counts.hits) > _HITS:
        parts.append(f"{len(counts.hits) - _HITS} more are in `{job.dropped.name}`.")
    return parts


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
