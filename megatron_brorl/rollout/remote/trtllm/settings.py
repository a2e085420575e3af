"""Settings of TensorRT-LLM that are computed without importing it."""

from __future__ import annotations

from collections.abc import Iterable

KV_CACHE = "kv_cache"  # memory tag of the KV cache
_SENT_AGAIN = ("model_weights", "draft_model_weights")  # tags of weights, which the trainer sends again after a sleep


def sleep_tags(known: Iterable[str]) -> list[str]:
    """Return the tags of all memory that a sleep frees: all tags except internal ones, which start with _."""
    return [tag for tag in known if not tag.startswith("_")]


def restore_modes(tags: Iterable[str]) -> dict[str, str]:
    """Return whether a sleep drops each tag's memory ("NONE") or keeps it in host memory ("CPU").

    Weights are sent again after a sleep, and the KV cache is empty. All other memory is restored, for example rotary
    embeddings (tag "model") and the sampler's state.
    """
    return {tag: "NONE" if tag in (KV_CACHE, *_SENT_AGAIN) else "CPU" for tag in tags}


def rows_at_a_time(kv_tokens: int, context: int, max_rows: int) -> int:
    """Return how many requests run together if keys and values of `kv_tokens` tokens fit.

    The scheduler reserves `context` tokens for each request. Raises ValueError if not even one request fits.
    """
    fitting = kv_tokens // context
    if not fitting:
        raise ValueError(
            f"keys and values of {kv_tokens} tokens fit, and one response with its prompt may take {context}: raise "
            "engine.memory_fraction or engine.tensor, set train.offload = true, or lower rollout.max_tokens"
        )
    return min(max_rows, fitting)
