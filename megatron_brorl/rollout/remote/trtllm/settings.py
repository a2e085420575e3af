"""Settings of TensorRT-LLM that can be computed without it."""

from __future__ import annotations

from collections.abc import Iterable

KV_CACHE = "kv_cache"  # memory tag of keys and values
_SENT_AGAIN = ("model_weights", "draft_model_weights")  # a sleep may lose these, because weights follow it


def sleep_tags(known: Iterable[str]) -> list[str]:
    """Return the tags of all memory that a sleep gives back; internal tags begin with _."""
    return [tag for tag in known if not tag.startswith("_")]


def restore_modes(tags: Iterable[str]) -> dict[str, str]:
    """Return whether each tag's memory is lost in a sleep ("NONE") or kept in host memory ("CPU").

    Weights are sent again after a sleep and caches are empty. Everything else, such as the tables of rotary embeddings
    under "model" or the sampler's state, is needed as it was.
    """
    return {tag: "NONE" if tag in (KV_CACHE, *_SENT_AGAIN) else "CPU" for tag in tags}


def graph_sizes(rows: int) -> list[int]:
    """Return the batch sizes of CUDA graphs, up to `rows`. Others are padded, by a quarter at most above 32.

    TensorRT-LLM's own list doubles above 128: 260 rows would be computed as 512.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, rows, 64)]
    return [size for size in sizes if size < rows] + [rows]


def rows_at_a_time(kv_tokens: int, context: int, most: int) -> int:
    """Return how many requests run together where keys and values of `kv_tokens` tokens fit.

    The scheduler reserves the longest response, prompt + response tokens = context, for each request. Raises ValueError
    where not even one fits.
    """
    fitting = kv_tokens // context
    if not fitting:
        raise ValueError(
            f"keys and values of {kv_tokens} tokens fit, and one response with its prompt may take {context}: raise "
            "engine.memory_fraction or engine.tensor, set train.offload = true, or lower rollout.max_tokens"
        )
    return min(most, fitting)
