"""Options of the fake package, and the recorded interface of the release."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

from dying import fault_point

VERSION = os.environ.get("BRORL_DOUBLE_VERSION", "1.3.0rc29")
KV_TOKENS = int(os.environ.get("BRORL_DOUBLE_KV_TOKENS", "200000"))
LISTING = json.loads((Path(__file__).parents[2] / "listings" / "tensorrt_llm_1_3.json").read_text(encoding="utf-8"))
__all__ = ["KV_TOKENS", "LISTING", "VERSION", "Recorded", "fault_point"]


class Recorded:
    """Base of classes that accept only the recorded arguments, like pydantic with extra = "forbid"."""

    usual: ClassVar[dict[str, Any]] = {}  # defaults that are not None
    refusal: ClassVar[type[Exception]] = ValueError

    def __init__(self, **options: Any) -> None:
        parameters = LISTING["signatures"][type(self).__name__][1:]
        unknown = sorted(options.keys() - set(parameters))
        if unknown:
            raise self.refusal(f"{type(self).__name__} has no argument {', '.join(unknown)}")
        for name in parameters:
            setattr(self, name, options.get(name, self.usual.get(name)))
        self.check()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)})"

    def check(self) -> None:
        """Raise ValueError for values that TensorRT-LLM refuses."""
