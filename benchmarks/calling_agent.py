"""The agent of benchmarks/bench_turns.py."""

from __future__ import annotations

from typing import Any


async def solve(row: dict[str, Any], client: Any, model: str) -> float:
    """Call the policy row["metadata"]["turns"] times in one conversation."""
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for _ in range(row["metadata"]["turns"]):
        response = await client.chat.completions.create(model=model, messages=messages)
        reply = response.choices[0].message.content
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "ok"}]
    return 0.0
