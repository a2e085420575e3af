"""Size of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from tensorrt_llm._double import KV_TOKENS, LISTING

ResourceManagerType = Enum("ResourceManagerType", {name: name for name in LISTING["members"]["ResourceManagerType"]})


@dataclass
class KvCacheStats:
    max_num_blocks: int = 0
    tokens_per_block: int = 0
    allocated_bytes: int = 0


class KVCacheManager:
    """A cache of BRORL_DOUBLE_KV_TOKENS tokens, or max_tokens if that is less. Version 2, which "auto" selects too,
    reports only bytes."""

    def __init__(self, config: Any) -> None:
        self.is_version_2 = config.use_kv_cache_manager_v2 is not False
        self.tokens_per_block = config.tokens_per_block
        self.blocks = min(KV_TOKENS, config.max_tokens or KV_TOKENS) // self.tokens_per_block

    def get_kv_cache_stats(self) -> KvCacheStats:
        if self.is_version_2:
            return KvCacheStats(allocated_bytes=self.blocks * self.tokens_per_block * 1024)
        return KvCacheStats(self.blocks, self.tokens_per_block)


class ResourceManager:
    def __init__(self, managers: dict[Any, Any]) -> None:
        self.resource_managers = managers

    def get_resource_manager(self, kind: Any) -> Any:
        return self.resource_managers.get(kind)
