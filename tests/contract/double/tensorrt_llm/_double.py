"""What a test chooses about the double."""

from __future__ import annotations

import os

from dying import come_to

API = os.environ.get("BRORL_DOUBLE_API", "1.3")
KV_TOKENS = int(os.environ.get("BRORL_DOUBLE_KV_TOKENS", "200000"))
SEEDS = os.environ.get("BRORL_DOUBLE_SEEDS", "1") == "1"
assert API in ("1.2", "1.3"), API
__all__ = ["API", "KV_TOKENS", "SEEDS", "come_to"]
