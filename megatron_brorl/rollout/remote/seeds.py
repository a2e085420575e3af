"""What decides which tokens an engine draws, found out by drawing from its random weights."""

from __future__ import annotations

from megatron_brorl.rollout.remote.protocol import Completion, EngineLeaf

REPEATED = "siblings on different engines would repeat one another"
_TOKENS = 16  # so many that no two draws agree by chance


async def draw(leaf: EngineLeaf, seed: int) -> Completion:
    """One rollout of a few tokens by a seed, temperature 1, nothing cut, with its log-probs."""
    o = leaf.options
    ids = [i % o.vocab for i in range(min(8, o.context // 2))]
    params = leaf.params(1.0, 1.0, 0, min(_TOKENS, o.context - len(ids)), seed)
    return await leaf.completion(leaf.submit(ids, params))


async def of_requests(leaf: EngineLeaf) -> bool:
    """Whether a request's own seed, and nothing else, decides."""
    first, again, other = [(await draw(leaf, seed)).token_ids for seed in (1, 1, 2)]
    return first == again and first != other


async def require_of_requests(leaf: EngineLeaf, engine: str) -> None:
    """Raises ValueError unless `of_requests`. engine: its name and version."""
    if not await of_requests(leaf):
        raise ValueError(f"{engine} takes no seed per request: {REPEATED}")
