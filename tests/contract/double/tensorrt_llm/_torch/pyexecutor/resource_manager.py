"""What is known of the memory of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from tensorrt_llm._double import KV_TOKENS


class ResourceManagerType(Enum):
    KV_CACHE_MANAGER = "KV_CACHE_MANAGER"
    SEQ_SLOT_MANAGER = "SEQ_SLOT_MANAGER"


@dataclass
class KvCacheStats:
    max_num_blocks: int
    tokens_per_block: int


class KVCacheManager:
    """As much as fits (BRORL_DOUBLE_KV_TOKENS), or max_tokens where that is less."""

    def __init__(self, config: Any) -> None:
        self.tokens_per_block = config.tokens_per_block
        self.blocks = min(KV_TOKENS, config.max_tokens or KV_TOKENS) // self.tokens_per_block

    def get_kv_cache_stats(self) -> KvCacheStats:
        return KvCacheStats(self.blocks, self.tokens_per_block)


class ResourceManager:
    def __init__(self, managers: dict[ResourceManagerType, Any]) -> None:
        self.resource_managers = managers

    def get_resource_manager(self, kind: ResourceManagerType) -> Any:
        return self.resource_managers.get(kind)
