"""Sample from a Hugging Face model with the built-in engine, in this process and without a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from megatron_brorl.checkpoints.hugging_face import open_checked
from megatron_brorl.config.schema import DataConfig
from megatron_brorl.data.chat import Message, check_messages
from megatron_brorl.data.hub import model_directory
from megatron_brorl.data.prompts import render
from megatron_brorl.data.tokenizers import Tokenizer, load_tokenizer, stop_ids
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.gpt import DTYPES
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops.backend import backend
from megatron_brorl.ops.philox import stream_key
from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.rewards.scoring import without_stop
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native.torch_engine import TorchEngine
from megatron_brorl.types import Prompt, Rollout


@dataclass(frozen=True)
class Sample:
    """One response."""

    text: str  # without the stop token, but with the stop string if one ended it
    token_ids: tuple[int, ...]  # with the stop token
    log_probs: tuple[float, ...]  # of each token under the sampling distribution, in nats
    finish: Literal["stop", "length"]  # "stop": a stop token or string ended it; "length": max_tokens did


class Engine:
    """A model to sample from: `with Engine.from_pretrained(directory) as engine: engine.sample(...)`."""

    def __init__(self, engine: TorchEngine, tokenizer: Tokenizer, stop_ids: tuple[int, ...]) -> None:
        """Use from_pretrained instead. stop_ids: the tokens that end a response."""
        self._engine: TorchEngine | None = engine
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._context = engine.shape.context

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        dtype: Literal["fp32", "bf16"] = "fp32",
        max_num_seqs: int = 2048,
        kv_cache_mib: int = 0,
        implementation: Literal["fused", "reference"] = "fused",
    ) -> Engine:
        """Load a Hugging Face directory, or a model of the hub by its name.

        max_num_seqs: responses decoded at a time. kv_cache_mib: memory for keys and values; 0 = half of the free
        memory. implementation: "reference" uses plain torch. Raises UserError if the model is incomplete or unknown.
        """
        if dtype not in DTYPES:
            raise UserError(f"Engine.from_pretrained: dtype = {dtype!r}: must be one of {', '.join(DTYPES)}")
        _check_minimum("Engine.from_pretrained", minimum=1, max_num_seqs=max_num_seqs)
        path = model_directory(str(directory))
        shape = read_shape(path)
        tokenizer = load_tokenizer(path)
        names = hf_shapes(shape)
        checkpoint = open_checked(path, shape)

        device = cpu_bridge.default_device()
        ops = backend(implementation, device)
        engine = TorchEngine(
            shape=shape,
            names=names,
            device=device,
            dtype=DTYPES[dtype],
            max_rows=max_num_seqs,
            sample=ops.sample_tokens,
            ops=ops.decode,
            memory=kv_cache_mib * 2**20,
            decode=tokenizer.decode_all,  # stop strings may contain special tokens
        )
        engine.update_weights(((name, checkpoint.tensor(name)) for name in names), version=0)
        return cls(engine, tokenizer, stop_ids(path, tokenizer))

    def sample(
        self,
        prompts: Sequence[str | Sequence[Message] | Sequence[int]],
        n: int = 512,
        *,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        seed: int = 0,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[list[Sample]]:
        """Sample n responses to each prompt: [prompts][n]. The chat template is applied to lists of messages only.

        Lists of token ids are used as they are. stop: strings that end a response. chat_template_kwargs:
        variables of the chat template. The date in a template is that on which the engine was created.

        The random numbers of a response depend only on the seed, the tokens of its prompt (and how often that prompt
        occurred before in the list), its index among the n, and the position of the token. Other prompts, their order
        and n do not matter. temperature = 0 is greedy, and top_k = 0 is off. Raises UserError for invalid arguments.
        """
        engine = self._engine
        if engine is None:
            raise UserError("Engine.sample: the engine is closed; make another by Engine.from_pretrained")
        if isinstance(prompts, str):
            raise UserError("Engine.sample: prompts is one string; give a list, [prompt]")
        if chat_template_kwargs and all(isinstance(prompt, str) for prompt in prompts):
            raise UserError("Engine.sample: chat_template_kwargs: no prompt is a list of messages; leave it out")
        _check_minimum("Engine.sample", minimum=1, n=n, max_tokens=max_tokens)
        _check_minimum("Engine.sample", minimum=0, top_k=top_k, temperature=temperature)
        if not 0 < top_p <= 1:
            raise UserError(f"Engine.sample: top_p = {top_p!r}: must be in (0, 1]")
        if max_tokens >= self._context:
            raise UserError(
                f"Engine.sample: max_tokens = {max_tokens}: must be below the model's context of {self._context} tokens"
            )

        chat = DataConfig(chat=True, chat_template_kwargs=dict(chat_template_kwargs))
        max_prompt_tokens = self._context - max_tokens
        repeats: Counter[tuple[int, ...]] = Counter()  # a repeated prompt gets another random stream
        requests = []
        for i, prompt in enumerate(prompts):
            ids = _token_ids(prompt, f"prompts[{i}]", self._tokenizer, max_prompt_tokens, chat, engine.shape.vocab)
            key = stream_key(seed, "sample", " ".join(map(str, ids)), repeats[ids])
            repeats[ids] += 1
            request_prompt = Prompt(str(i), text="", token_ids=ids, answer=None, verifier="exact")
            requests.append(Request(request_prompt, key=key, n=n))

        # One call for all prompts, so that responses of one prompt start as others end.
        stop_strings = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = Sampling(temperature, top_p, top_k, max_tokens, self._stop_ids, stop_strings)
        return [[self._sample(rollout) for rollout in group] for group in engine.generate(requests, sampling)]

    def close(self) -> None:
        """Free the memory of weights and caches. The engine cannot be used afterwards."""
        if self._engine:
            self._engine.sleep()
        self._engine = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sample(self, rollout: Rollout) -> Sample:
        text = self._tokenizer.decode(without_stop(rollout.token_ids, self._stop_ids).tolist())
        assert rollout.finish != "cut"  # the call has no tokens_per_call and cannot be cancelled
        return Sample(text, tuple(rollout.token_ids.tolist()), tuple(rollout.log_probs.tolist()), rollout.finish)


def _token_ids(
    prompt: object, where: str, tokenizer: Tokenizer, limit: int, chat: DataConfig, vocab: int
) -> tuple[int, ...]:
    """Return the ids of a prompt, at most `limit`. chat: how messages become a prompt. vocab: number of token ids."""
    if isinstance(prompt, str):
        return render(prompt, tokenizer, DataConfig(), limit, where)[1]
    if not isinstance(prompt, Sequence):
        raise UserError(f"{where}: must be a string or a list of messages or token ids, not {type(prompt).__name__}")
    if prompt and all(isinstance(i, int) for i in prompt):
        if len(prompt) > limit or not all(0 <= i < vocab for i in prompt):
            raise UserError(
                f"{where}: must be at most {limit} token ids from 0 to {vocab - 1}, to leave room for a response"
            )
        return tuple(prompt)
    return render(check_messages(prompt, where), tokenizer, chat, limit, where)[1]


def _check_minimum(where: str, minimum: int, **values: float) -> None:
    for name, value in values.items():
        if not minimum <= value < math.inf:
            raise UserError(f"{where}: {name} = {value!r}: must be finite and at least {minimum}")
