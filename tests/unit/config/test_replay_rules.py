"""Where router replay is on, and the engines that cannot have it."""

from __future__ import annotations

import pytest

from megatron_brorl.config.load import load_table
from megatron_brorl.errors import UserError
from megatron_brorl.rollout.remote.engine import connect_engine
from megatron_brorl.train.sampling_params import training_sampling_params

BF16 = "rollout.dtype=bf16"
FP8 = ("rollout.engine=vllm", "engine.quantization=fp8")


def test_routes_are_replayed_where_engine_and_trainer_round_differently():
    for overrides, experts, expected in (
        ([], 8, False),
        ([BF16], 8, True),
        ([BF16], 0, False),
        ([BF16, "model.dtype=bf16"], 8, False),
        ([BF16, "model.dtype=bf16", *FP8], 8, True),
        (["rollout.replay_routes=always"], 8, True),
        ([BF16, "rollout.replay_routes=never"], 8, False),
    ):
        config = load_table({}, "run.toml", overrides)
        assert training_sampling_params(config, (2,), experts).routes is expected


def test_an_engine_that_returns_no_routes_is_refused():
    config = load_table({}, "run.toml", [BF16, "rollout.engine=trtllm"])
    with pytest.raises(UserError, match=r"replay_routes = \"auto\": TensorRT-LLM does not return .* set \"never\""):
        connect_engine(config, {}, 200, 304, (2,), routes=True)
