"""Sampling without a run: a model of a Hugging Face directory in the built-in engine, in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from megatron_brorl.checkpoints.hugging_face import Checkpoint
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
from megatron_brorl.rollout.native.engine import TorchEngine
from megatron_brorl.types import Prompt, Rollout


@dataclass(frozen=True)
class Sample:
    """One response."""

    text: str  # without the token that ended it; with a stop string, if one did
    token_ids: tuple[int, ...]  # with the token that ended it
    log_probs: tuple[float, ...]  # of each token under the distribution that was sampled from, in nats
    finish: Literal["stop", "length"]  # by a stop token or string; by max_tokens


class Engine:
    """A model to sample from: `with Engine.from_pretrained(directory) as engine: engine.sample(...)`."""

    def __init__(self, engine: TorchEngine, tokenizer: Tokenizer, ends: tuple[int, ...]) -> None:
        """Use from_pretrained. ends: ids of the tokens that end a response."""
        self._engine: TorchEngine | None = engine
        self._tokenizer, self._ends, self._shape = tokenizer, ends, engine.shape

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
        """The model of a Hugging Face directory, or of the hub by its name (as model.path of a run).

        max_num_seqs: responses decoded at a time. kv_cache_mib: for keys and values; 0 = half of what is free.
        implementation: as ops.implementation. Raises UserError for what is no model that this package knows.
        """
        if dtype not in DTYPES:
            raise UserError(f"Engine.from_pretrained: dtype = {dtype!r}: must be one of {', '.join(DTYPES)}")
        _at_least("Engine.from_pretrained", "max_num_seqs", max_num_seqs, 1)
        # The files that a run reads of model.path.
        path = model_directory(str(directory))
        shape, tokenizer = read_shape(path), load_tokenizer(path)

        # Every tensor is looked for before one is read.
        names, checkpoint = hf_shapes(shape), Checkpoint(path)
        checkpoint.check(names)
        checkpoint.check_tied(shape)

        # The engine as a run has it, without a trainer to hand it weights.
        where = cpu_bridge.default_device()
        ops = backend(implementation, where)
        engine = TorchEngine(
            shape=shape,
            names=names,
            device=where,
            dtype=DTYPES[dtype],
            max_rows=max_num_seqs,
            sample=ops.sample_tokens,
            ops=ops.decode,
            memory=kv_cache_mib * 2**20,
            # For stop strings, which may be the text of any special token.
            decode=tokenizer.decode_all,
        )
        engine.update_weights(((name, checkpoint.tensor(name)) for name in names), 0)
        return cls(engine, tokenizer, stop_ids(path, tokenizer))

    def sample(
        self,
        prompts: Sequence[str | Sequence[Message]],
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
        """n responses to each prompt: [prompts][n]. A string is taken as it is, messages by the chat template.

        chat_template_kwargs: variables of the chat template, as data.chat_template_kwargs of a run. A template that
        writes today's date writes the date on which the engine was made.

        A response's random numbers are a function of the seed, its prompt's tokens (and how often the prompt came
        before in this list), its place among the n and the token's position: other prompts, their order and n do not
        change them. temperature = 0 is greedy, top_k = 0 is off. Raises UserError for what cannot be sampled.
        """
        engine = self._engine
        if engine is None:
            raise UserError("Engine.sample: the engine is closed; make another by Engine.from_pretrained")
        if isinstance(prompts, str):
            raise UserError("Engine.sample: prompts is one string; give a list, [prompt]")
        if chat_template_kwargs and all(isinstance(prompt, str) for prompt in prompts):
            raise UserError("Engine.sample: chat_template_kwargs: no prompt is a list of messages; leave it out")
        _check(n, max_tokens, temperature, top_p, top_k)

        # What each prompt is to the model, and its random stream.
        limit = self._shape.context - max_tokens
        # Only prompts that are messages go through the chat template.
        chat = DataConfig(chat=True, chat_template_kwargs=dict(chat_template_kwargs))
        ids = [_tokens(prompt, f"prompts[{i}]", self._tokenizer, limit, chat) for i, prompt in enumerate(prompts)]
        # A prompt that is there twice has two streams, in the order of the list.
        seen: Counter[tuple[int, ...]] = Counter()
        requests = []
        for i, tokens in enumerate(ids):
            key = stream_key(seed, "sample", " ".join(map(str, tokens)), seen[tokens])
            seen[tokens] += 1
            requests.append(Request(Prompt(str(i), "", tokens, None, "exact"), key, n))

        # Generate all requests in one call, so that rows of one prompt enter as rows of another end.
        # A single string is one stop string, and not a list of its letters.
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = Sampling(temperature, top_p, top_k, max_tokens, self._ends, stops)
        return [[self._sample(row) for row in rows] for rows in engine.generate(requests, sampling)]

    def close(self) -> None:
        """Give the memory of weights and caches back; the engine cannot be used afterwards."""
        if self._engine:
            self._engine.sleep()
        self._engine = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sample(self, rollout: Rollout) -> Sample:
        text = self._tokenizer.decode(without_stop(rollout.token_ids, self._ends).tolist())
        assert rollout.finish != "cut"  # nothing cancels, and there is no budget
        return Sample(text, tuple(rollout.token_ids.tolist()), tuple(rollout.log_probs.tolist()), rollout.finish)


def _tokens(prompt: object, where: str, tokenizer: Tokenizer, limit: int, chat: DataConfig) -> tuple[int, ...]:
    """Return the ids of a prompt, at most `limit`. chat: how messages become a prompt."""
    if isinstance(prompt, str):
        return render(prompt, tokenizer, DataConfig(), limit, where)[1]
    if not isinstance(prompt, Sequence):
        raise UserError(f"{where}: must be a string or a list of messages, not {type(prompt).__name__}")
    return render(check_messages(prompt, where), tokenizer, chat, limit, where)[1]


def _check(n: int, max_tokens: int, temperature: float, top_p: float, top_k: int) -> None:
    _at_least("Engine.sample", "n", n, 1)
    _at_least("Engine.sample", "max_tokens", max_tokens, 1)
    _at_least("Engine.sample", "top_k", top_k, 0)
    _at_least("Engine.sample", "temperature", temperature, 0)
    if not 0 < top_p <= 1:
        raise UserError(f"Engine.sample: top_p = {top_p!r}: must be in (0, 1]")


def _at_least(where: str, name: str, value: float, least: int) -> None:
    if not value >= least:
        raise UserError(f"{where}: {name} = {value!r}: must be at least {least}")
