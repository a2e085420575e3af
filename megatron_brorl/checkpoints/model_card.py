"""Write the model card (README.md) of an exported model: metadata for the hub, and a description of the training.

The text depends only on the run, so the same run always produces the same bytes.
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
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LICENCE_KEYS = ("license", "license_name", "license_link")

_TEMPLATE = """---
{{ card_data }}
---

# {{ training.run }}

{% macro table(rows) -%}
{% for row in rows -%}
| {{ row | join(" | ") }} |
{% if loop.first -%}
|{{ " --- |" * (row | length) }}
{% endif -%}
{% endfor -%}
{%- endmacro -%}
## Training

{{ table(facts) }}
## Data

{% if files %}{{ table(files) }}
{% endif -%}
{% if tasks %}Generated prompts of the reasoning-gym tasks {{ tasks | join(", ") }}.

{% endif -%}
{% if verifiers %}Responses were scored by {{ verifiers | join(", ") }}.

{% endif -%}
## Evaluation

{% if metrics -%}
{{ evaluated }}

{{ table(metrics) }}
{% else -%}
No held-out prompts were evaluated in this run.

{% endif -%}
## Limitations

* Improvements are shown for the prompts above only. Rewards come from programs, and a model can exploit their gaps.
* The training does not address harmful, private or false text; the restrictions of the base model apply.
* The program that trained the model wrote this card; no one has reviewed it.
"""


@dataclass(frozen=True)
class InitialModel:
    """The model that training started from."""

    name: str  # the name on the hub, or the name of the folder or run
    hub: str  # its name on the hub, or ""
    licence: Mapping[str, str]  # the entries of its model card under _LICENCE_KEYS

    @classmethod
    def of(cls, path: str, directory: Path) -> InitialModel:
        """Return the description of the model in `directory`. path: model.path, as the user wrote it."""
        card = _metadata(directory / CARD)
        hub_name = path if _HUB_NAME.fullmatch(path) and not Path(path).exists() else card.get("base_model")
        hub = hub_name if isinstance(hub_name, str) and _HUB_NAME.fullmatch(hub_name) else ""
        licence = {key: card[key] for key in _LICENCE_KEYS if isinstance(card.get(key), str)}
        folder = Path(path).absolute()
        folder = folder.parent if folder.name == "model" else folder  # run.dir/model is named after the run
        return cls(name=path if path == hub else folder.name, hub=hub, licence=licence if "license" in licence else {})


@dataclass(frozen=True)
class TrainingFacts:
    """Facts about the training that the model card states."""

    run: str  # name of the run's folder
    how: str  # "reinforcement learning with verifiable rewards", "supervised training"
    tag: str  # `how` as a tag of the hub
    base: InitialModel
    sizes: Sequence[tuple[str, str]]  # quantities and their values
    files: Sequence[tuple[str, str, int]] = ()  # configuration key, name and row count of data files
    tasks: Sequence[str] = ()  # tasks that generated prompts
    verifiers: Sequence[str] = ()
    began: float = 0.0  # Unix time, or 0
    before: Mapping[str, Any] | None = None  # evaluation of the held-out prompts before training, as in summary.json
    after: Mapping[str, Any] | None = None  # the same after training


def model_card(training: TrainingFacts) -> str:
    """Return the text of README.md."""
    from huggingface_hub import ModelCard, ModelCardData  # slow to import

    licence: dict[str, Any] = dict(training.base.licence) or {"license": "other"}
    data = ModelCardData(
        base_model=training.base.hub or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["megatron-brorl", training.tag],
        **licence,
    )
    began = [("began", time.strftime("%Y-%m-%d (UTC)", time.gmtime(training.began)))] if training.began else []
    trained_by = ("trained by", f"megatron-brorl {__version__}, {training.how}")
    measured = training.after or training.before
    files = [(_code(name), f"`{key}`", f"{rows:,}") for key, name, rows in training.files]
    card = ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        training=training,
        facts=[("", ""), trained_by, *began, ("base model", _code(training.base.name)), *training.sizes],
        files=files and [("file", "key", "rows"), *files],
        tasks=[_code(name) for name in training.tasks],
        verifiers=[_code(name) for name in training.verifiers],
        evaluated=measured and f"{measured['prompts']:,} held-out prompts, {measured['samples']} samples each",
        metrics=measured and _metrics(training.before, training.after),
    )
    return str(card)


def _metrics(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> list[Sequence[str]]:
    """Return the table of both evaluations; one of them may be missing."""
    evaluations = before, after
    present = [e for e in evaluations if e]
    rows = [("", "before", "after"), ("pass@1 (95% interval)", *(_interval(e, "pass_at_1") for e in evaluations))]
    for k in sorted(present[-1]["pass_at_k"], key=int):
        if int(k) > 1:
            rows.append((f"pass@{k}", *(f"{e['pass_at_k'][k]:.4f}" if e else "-" for e in evaluations)))
    if any(e["mean_reward"]["mean"] != e["pass_at_1"]["mean"] for e in present):
        rows.append(("mean reward (95% interval)", *(_interval(e, "mean_reward") for e in evaluations)))
    return list(rows)


def _interval(evaluation: Mapping[str, Any] | None, metric: str) -> str:
    estimate = evaluation[metric] if evaluation else None
    return f"{estimate['mean']:.4f} ({estimate['low']:.4f} to {estimate['high']:.4f})" if estimate else "-"


def _code(name: str) -> str:
    """Return a name as code within a table, without the folders of this machine."""
    name = Path(name).name if name.startswith("/") else name
    return f"`{re.sub(r'[`|]|[^ -~]', '?', name)}`"


def _metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a card, or {}."""
    if not path.is_file():
        return {}
    from huggingface_hub import metadata_load

    try:
        data = metadata_load(path)
    except Exception:  # the file comes from elsewhere; if it is malformed, it names no licence
        return {}
    return data if isinstance(data, dict) else {}
