"""A benchmark's job as the options of this project's vLLM engine, for the engine alone and for the engine behind us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_brorl.rollout.remote.options import EngineOptions


def engine_options(job: dict[str, Any]) -> EngineOptions:
    """No stop tokens, and room for all siblings at once."""
    shape = json.loads((Path(job["model"]) / "config.json").read_text(encoding="utf-8"))
    return EngineOptions(
        engine="vllm",
        model=job["model"],
        vocab=shape["vocab_size"],
        context=len(job["prompts"][0]) + max(job["lengths"]),
        dtype={"fp32": "float32", "bf16": "bfloat16"}[job["dtype"]],
        max_rows=len(job["lengths"]),
        stop_ids=(),
        section=job["section"],
        threads=job["threads"],
        kv_bytes=job["kv_gib"] << 30,
    )
