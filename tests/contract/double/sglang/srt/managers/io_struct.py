"""Requests to the tokenizer manager and their answers."""

from __future__ import annotations

from dataclasses import dataclass

from sglang._strict import Strict


class BaseReq(Strict):
    def __post_init__(self) -> None:
        self.check()


@dataclass(kw_only=True)
class BeginWeightUpdateReqInput(BaseReq):
    selector: str = "all"


@dataclass(kw_only=True)
class EndWeightUpdateReqInput(BaseReq):
    pass


@dataclass(kw_only=True)
class UpdateWeightsFromTensorReqInput(BaseReq):
    serialized_named_tensors: list[bytes]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    selector: str = "all"
    torch_empty_cache: bool = False


@dataclass(kw_only=True)
class ReleaseMemoryOccupationReqInput(BaseReq):
    tags: list[str] | None = None


@dataclass(kw_only=True)
class ResumeMemoryOccupationReqInput(BaseReq):
    tags: list[str] | None = None


@dataclass(kw_only=True)
class FlushCacheReqOutput(BaseReq):
    success: bool
    message: str = ""
