"""README.md of an exported model: what the hub reads at its top, and for people what was done to the model.

A function of the run alone: the same run writes the same bytes whenever it writes them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_brorl import __version__

CARD = "README.md"
_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_NO_LICENCE = "other"
_CARRIED = ("license", "license_name", "license_link")  # keys of a card that say under which terms a model may be used

_LOADING = """## How to load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

directory = "."  # of this file
model = AutoModelForCausalLM.from_pretrained(directory)
tokenizer = AutoTokenizer.from_pretrained(directory)
```

`brorl evaluate` takes the directory as `model.path`."""

_LIMITS = """## What it is not

* Not shown to be better at anything but the prompts named here. Rewards come from programs, and a model can learn what
  a program overlooks.
* Not made safer: nothing in this training concerns harmful, private or untrue text. What its base model must not be
  used for, this one must not either.
* Not reviewed by people: this card was written by the program that trained the model."""


@dataclass(frozen=True)
class Base:
    """The model that training began with, as far as its directory says."""

    name: str  # for people: its name on the hub, or that of its folder or run
    hub: str  # its name on the hub; "" = none is known
    licence: Mapping[str, str]  # of _CARRIED, what its own card has

    @classmethod
    def of(cls, path: str, directory: Path) -> Base:
        """path: as model.path names it. directory: where it lies."""
        own = _front_matter(directory / CARD)
        named = path if _HUB.fullmatch(path) and not Path(path).exists() else own.get("base_model")
        hub = named if isinstance(named, str) and _HUB.fullmatch(named) else ""
        licence = {key: own[key] for key in _CARRIED if isinstance(own.get(key), str)}
        folder = Path(path).absolute()
        folder = folder.parent if folder.name == "model" else folder  # of a run of this project
        return cls(path if path == hub else folder.name, hub, licence if "license" in licence else {})


@dataclass(frozen=True)
class Training:
    """What was done to the model, from the record of its run."""

    run: str  # name of the run's folder
    how: str  # "reinforcement learning with verifiable rewards", "supervised training"
    tag: str  # the same as the hub's tags have it
    base: Base
    sizes: Sequence[tuple[str, str]]  # what the training was made of, in words and figures
    files: Sequence[tuple[str, str, int]] = ()  # of data: key of the configuration, name, rows
    tasks: Sequence[str] = ()  # that prompts were generated of
    verifiers: Sequence[str] = ()
    licence: str = ""  # run.license
    began: float = 0.0  # Unix time; 0 = the run's record does not say
    before: Mapping[str, Any] | None = None  # evaluations of the held-out prompts, as in summary.json
    after: Mapping[str, Any] | None = None


def model_card(training: Training) -> str:
    """The whole text of README.md."""
    t = training
    facts = [("trained by", f"megatron-brorl {__version__}, {t.how}"), *_began(t), ("base model", _code(t.base.name))]
    parts = [f"---\n{_yaml(t)}---", f"# {t.run}", "## The run", _table(("", ""), [*facts, *t.sizes])]
    if not (t.before or t.after):  # a sentence in place of the section
        parts.append("No held-out prompts were evaluated in this run, so that there are no figures to report.")
    parts += ["## Data", _data(t)]
    if t.before or t.after:
        parts += ["## Figures", _figures(t.before, t.after)]
    return "\n\n".join([*parts, _LOADING, _LIMITS]) + "\n"


def _began(t: Training) -> list[tuple[str, str]]:
    """The day, where the run's record names one."""
    try:
        return [("began", time.strftime("%Y-%m-%d (UTC)", time.gmtime(t.began)))] if t.began else []
    except (OverflowError, ValueError, OSError):  # run.started may be any number, and no model is lost for it
        return []


def _yaml(t: Training) -> str:
    """The front matter between its lines of dashes."""
    from huggingface_hub import ModelCardData  # here because it takes a while to import

    licence: dict[str, Any] = {"license": t.licence} if t.licence else dict(t.base.licence) or {"license": _NO_LICENCE}
    data = ModelCardData(
        base_model=t.base.hub or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["megatron-brorl", t.tag],
        **licence,
    )
    return data.to_yaml(line_break="\n").rstrip("\n") + "\n"


def _data(t: Training) -> str:
    rows = [(_code(_shown(name)), f"`{key}`", f"{count:,}") for key, name, count in t.files]
    lines = [_table(("file", "read as", "rows"), rows)] if rows else []
    if t.tasks:
        lines.append(f"Generated prompts of reasoning-gym's tasks {', '.join(map(_code, t.tasks))}.")
    if t.verifiers:
        lines.append(f"Responses were judged by {', '.join(_code(_shown(name)) for name in t.verifiers)}.")
    return "\n\n".join(lines)


def _figures(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> str:
    """Both evaluations side by side, of which there is one at least."""
    measured = after or before or {}
    both = before, after
    rows = [("pass@1, with its 95% interval", *(_interval(each, "pass_at_1") for each in both))]
    for k in sorted(measured["pass_at_k"], key=int):
        if int(k) > 1:
            rows.append((f"pass@{k}", *(f"{each['pass_at_k'][k]:.4f}" if each else "-" for each in both)))
    if any(each and each["mean_reward"]["mean"] != each["pass_at_1"]["mean"] for each in both):
        rows.append(("mean reward, with its 95% interval", *(_interval(each, "mean_reward") for each in both)))
    asked = f"{measured['prompts']:,} held-out prompts, {measured['samples']} samples each; intervals are over prompts."
    return f"{asked}\n\n{_table(('', 'before', 'after'), rows)}"


def _interval(evaluation: Mapping[str, Any] | None, figure: str) -> str:
    p = evaluation[figure] if evaluation else None
    return f"{p['mean']:.4f} ({p['low']:.4f} to {p['high']:.4f})" if p else "-"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _code(text: str) -> str:
    """As code within a table, whatever a name has in it."""
    return f"`{re.sub(r'[`|]|[^ -~]', '?', text)}`"


def _shown(name: str) -> str:
    """A name without the folders of the machine that it was read on."""
    return Path(name).name if name.startswith("/") else name


def _front_matter(path: Path) -> dict[str, Any]:
    """What a card says at its top; nothing where there is none, or none that can be read."""
    if not path.is_file():
        return {}
    from huggingface_hub import metadata_load

    try:
        found = metadata_load(path)
    except Exception:  # of a file from elsewhere, read by a library: whatever it is, it names no licence
        return {}
    return found if isinstance(found, dict) else {}
