"""Keys that once had another name: what a configuration with it is told, and how older checkpoints are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED = {  # section.key before -> key now; a list of tables counts as a section
    "critic.steps_alone": "warmup_steps",
    "data.tasks.keep": "prompt_regex",
    "reference.reset_after_stalls": "reset_patience",
    "rollout.max_rows": "max_num_seqs",
    "rollout.memory_mib": "kv_cache_mib",
    "rollout.most_lost": "max_lost_share",
    "rollout.most_carried": "max_carried_steps",
    "shaping.cosine_off": "cosine_off_steps",
    "shaping.cosine_on": "cosine_on_steps",
    "theory.depth": "max_position",
    "train.seconds": "max_seconds",
    "train.stall_margin": "min_delta",
    "train.stalls": "patience",
    "trtllm.restarts": "max_restarts",
    "trtllm.silent_s": "heartbeat_timeout_s",
}


def with_names_of_now(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section that an older version wrote, by the names that its keys have now."""
    return {
        RENAMED.get(f"{section}.{key}", key): _tables(f"{section}.{key}", value) if isinstance(value, list) else value
        for key, value in values.items()
    }


def _tables(section: str, values: list[Any]) -> list[Any]:
    return [with_names_of_now(section, value) if isinstance(value, dict) else value for value in values]
