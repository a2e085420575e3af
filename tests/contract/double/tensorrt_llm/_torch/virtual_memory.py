"""The memory tags of both generations."""

from __future__ import annotations

from enum import Enum

from tensorrt_llm._double import API

_TAGS = [
    "_no_capture_init_model",  # internal
    *("sampler", "drafter", "guided_decoder", "spec_resource_manager", "model_extra", "executor_extra"),
    *("kv_cache", "model", "draft_model"),
]
if API == "1.3":
    _TAGS += ["model_weights", "draft_model_weights"]

ExecutorMemoryType = Enum("ExecutorMemoryType", {tag.upper(): tag for tag in _TAGS}, type=str)


def verify_sleep_wakeup_tags(tags: list[str]) -> list[ExecutorMemoryType]:
    """Raises ValueError where one is unknown."""
    return [ExecutorMemoryType(tag) for tag in tags]
