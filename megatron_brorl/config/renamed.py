"""Keys that once had another name: what a configuration with it is told, and how older checkpoints are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED = {  # section.key before -> key now
    "rollout.most_lost": "max_lost_share",
    "rollout.most_carried": "max_carried_steps",
}


def with_names_of_now(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section that an older version wrote, by the names that its keys have now."""
    return {RENAMED.get(f"{section}.{key}", key): value for key, value in values.items()}
