"""The endpoint with the openai package. A function in place of the engine gives the completions."""

from __future__ import annotations

import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import openai
import pytest
import torch
from unit.agents.test_agent_rollouts import TEMPLATE, agent_engine
from unit.data.test_call_formats import CODER, LLAMA
from unit.data.test_tokenizers import make_hf

from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.rollout.agents.sequences import Sequences
from megatron_brorl.rollout.agents.server import Endpoint
from megatron_brorl.rollout.engine import Sampling

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}</tool_call>'
PARAMETERS = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in (("city", "7"), ("days", "2")))
XML = f"<tool_call>\n<function=weather>\n{PARAMETERS}</function>\n</tool_call>"
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
def endpoint(tmp_path):
    """Yield a function that opens an endpoint whose calls are completed with these texts, and returns its client."""
    with contextlib.ExitStack() as stack:
        yield lambda *texts, **options: stack.enter_context(opened(tmp_path, texts, **options))


@contextlib.contextmanager
def opened(folder, texts, template=TEMPLATE, answers=True, call_tokens=50, **options):
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=call_tokens, stop_ids=(1,))
    options = {"max_calls": 9, "prompt_tokens": 400, **options}
    engine = agent_engine(make_hf(folder / "hf", chat_template=template), inner=None, sampling=sampling, **options)
    tokenizer = load_tokenizer(folder / "hf")
    texts = list(texts)
    submitted = SimpleQueue()

    def submit(call):
        submitted.put(call)
        if answers:
            finish(call, texts.pop(0))

    def finish(call, text, reason="stop"):
        ids = [*tokenizer.encode(text), *([1] if reason == "stop" else [])]
        call.ids, call.log_probs = torch.tensor(ids), torch.arange(len(ids)) / -8
        call.finish, call.stopped = reason.removesuffix(" string"), reason == "stop"
        call.done()

    sequences = Sequences(engine.chat, key=0)
    with contextlib.closing(engine), openai.OpenAI(base_url=engine.server.url, api_key="key") as client:
        engine.server.endpoints["key"] = Endpoint(sequences, sampling, submit)
        client.submitted, client.finish, client.server = submitted, finish, engine.server
        client.tokenizer, client.sequences = tokenizer, sequences
        yield client


def ask(client, messages=USER, **options):
    return client.chat.completions.create(model="policy", messages=messages, **options)


FORMATS = [
    ("hermes", TEMPLATE, f"Let me see.\n{CALL}{CALL}", {"city": "Oslo", "days": 2}, 2),
    # The schema says that a city is a string, so the text 7 does not become a number.
    ("hermes", CODER, f"Let me see.\n{XML}", {"city": "7", "days": 2}, 1),
    ("json", LLAMA, '{"name": "weather", "parameters": {"city": "Rome", "days": 1}}', {"city": "Rome", "days": 1}, 1),
]


@pytest.mark.parametrize(("format", "template", "text", "arguments", "count"), FORMATS)
def test_tool_calls_and_their_results_continue_the_tokens(endpoint, format, template, text, arguments, count):
    client = endpoint(text, "rainy", template=template, format=format)
    response = ask(client, tools=[WEATHER], tool_choice="auto")
    message = response.choices[0].message
    assert response.choices[0].finish_reason == "tool_calls"
    assert message.content == ("Let me see." if format == "hermes" else None)
    assert [call.function.name for call in message.tool_calls] == ["weather"] * count
    assert all(json.loads(call.function.arguments) == arguments for call in message.tool_calls)
    assert len({call.id for call in message.tool_calls}) == count
    results = [{"role": "tool", "tool_call_id": call.id, "content": "3 degrees"} for call in message.tool_calls]

    # Null and absent fields are equal, and fields that the endpoint does not know are ignored.
    echoed = {**message.model_dump(), "refusal": None, "annotations": [1]}
    second = ask(client, [*USER, echoed, *results], tools=[WEATHER])
    assert second.choices[0].message.content == "rainy"
    first = response.brorl["prompt_token_ids"] + response.brorl["token_ids"]
    prompt = second.brorl["prompt_token_ids"]
    assert prompt[: len(first)] == first
    tail = client.tokenizer.decode_all(prompt[len(first) :])
    assert tail == "\n" + "<|user|>3 degrees</s>\n" * count + "<|assistant|>\n"


MALFORMED = CALL.replace("}}", ", }}")


@pytest.mark.parametrize(
    ("text", "options"),
    [(MALFORMED, {"tools": [WEATHER]}), (CALL, {}), (CALL, {"tools": [WEATHER], "tool_choice": "none"})],
)
def test_a_call_that_is_malformed_or_not_allowed_is_text(endpoint, text, options):
    choice = ask(endpoint(text), **options).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls, choice.message.content) == ("stop", None, text)


def test_fields_of_a_response(endpoint, capfd):
    client = endpoint("hello world")
    response = ask(client, logprobs=True, temperature=0.3, seed=5, user="u", stop=None)
    ids = client.tokenizer.encode("hello world")
    assert response.brorl["token_ids"] == [*ids, 1]
    assert response.usage.completion_tokens == len(ids) + 1
    assert response.usage.prompt_tokens == len(response.brorl["prompt_token_ids"])
    tokens = response.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == "hello world"
    assert [token.logprob for token in tokens] == [-i / 8 for i in range(len(ids) + 1)]
    assert response.brorl["sampling"] == {"temperature": 1.0, "top_p": 1.0}
    assert "warning: the agent asks for {'temperature': 0.3}" in capfd.readouterr().err
    assert [model.id for model in client.models.list()] == ["policy"]


def test_a_stream_has_the_message_and_the_usage(endpoint):
    client = endpoint(f"So: {CALL}")
    chunks = list(ask(client, tools=[WEATHER], stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "So:"
    (call,) = [call for delta in deltas for call in delta.tool_calls or []]
    assert json.loads(call.function.arguments) == {"city": "Oslo", "days": 2}
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None, "tool_calls"]
    assert chunks[-1].usage.completion_tokens == len(client.tokenizer.encode(f"So: {CALL}")) + 1


REFUSED = [
    ({"n": 2}, "n"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"tool_choice": "required", "tools": [WEATHER]}, "tool_choice"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop": [""]}, "stop"),
    ({"extra_body": {"min_p": 0.1}}, "min_p"),
    ({"messages": [*USER, {"role": "assistant", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "critic", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 600}]}, "messages"),
]


@pytest.mark.parametrize(("options", "field"), REFUSED)
def test_a_request_that_would_be_sampled_otherwise_is_refused(endpoint, options, field):
    client = endpoint("x")
    with pytest.raises(openai.BadRequestError) as e:
        ask(client, **options)
    assert e.value.body["param"] == field
    assert e.value.response.headers["x-should-retry"] == "false"
    assert client.submitted.empty()
    assert ask(client).choices[0].message.content == "x"  # A refused request is not a call.
    client.server.endpoints.clear()
    with pytest.raises(openai.AuthenticationError):  # The key expires with its rollout.
        ask(client)


# expected: the token limit of each call, or the code of its error. A call samples two tokens: a letter and the stop.
LIMITS = [
    ({"call_tokens": 20}, {}, [20, 20, 20]),
    ({}, {"max_tokens": 7}, [7, 7, 7]),
    ({}, {"max_completion_tokens": 8}, [8, 8, 8]),
    ({"max_tokens": 4}, {"max_tokens": 30}, [4, 2, "max_tokens"]),
    ({"max_calls": 2}, {}, [50, 50, "max_calls"]),
]


@pytest.mark.parametrize(("limits", "options", "expected"), LIMITS)
def test_the_smallest_limit_of_tokens_counts(endpoint, limits, options, expected):
    client = endpoint("x", "y", "z", **limits)
    for limit_or_code in expected:
        if isinstance(limit_or_code, int):
            ask(client, **options)
            assert client.submitted.get().limit == limit_or_code
        else:
            with pytest.raises(openai.BadRequestError) as e:
                ask(client, **options)
            assert e.value.body["code"] == limit_or_code


def test_a_retry_waits_for_the_call_that_it_repeats(endpoint):
    """Both requests time out. The retry of the second one receives its completion. The first one is not trained."""
    client = endpoint(answers=False)
    for i in range(2):
        with pytest.raises(openai.APITimeoutError):
            ask(client.with_options(timeout=0.5, max_retries=0), [{"role": "user", "content": str(i)}])
    lost, call = client.submitted.get(), client.submitted.get()
    client.finish(lost, "late")
    with ThreadPoolExecutor(1) as pool:
        messages = [{"role": "user", "content": "1"}]
        retry = pool.submit(ask, client, messages, extra_headers={"x-stainless-retry-count": "1"})
        time.sleep(0.2)
        client.finish(call, "received")
        assert retry.result().choices[0].message.content == "received"
    assert client.sequences.rows() == [[call]]
    assert client.submitted.empty()  # Nothing is sampled twice.


def test_a_reply_that_ended_without_a_stop_token_gets_one(endpoint):
    """A stop string is not part of the text."""
    client = endpoint(answers=False)
    messages = list(USER)

    def call(text, reason, **options):
        """Complete a request with a text, and return the text of its prompt and of the reply."""
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(ask, client, list(messages), **options)
            submitted = client.submitted.get()
            assert submitted.stop == tuple(options.get("stop", ()))
            client.finish(submitted, text, reason)
            message = pending.result().choices[0].message
        messages.extend([message.model_dump(), {"role": "user", "content": "more"}])
        return client.tokenizer.decode_all(submitted.prompt_ids), message.content

    assert call("one two", "length")[1] == "one two"
    assert call("three. fo", "stop string", stop=".")[1] == "three"
    turn = "</s>\n<|user|>more</s>\n<|assistant|>\n"
    assert call("x", "stop")[0] == f"<|user|>hello</s>\n<|assistant|>\none two{turn}three. fo{turn}"


THOUGHTS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n{{ m.content if loop.last else "
    "m.content.split('</think>')[-1] }}</s>\n{% else %}<|user|>{{ m.content }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("history", "thought", "sequences"),
    [("keep", "<think>a</think>", 1), ("template", "<think>a</think>", 2), ("template", "", 1)],
)
def test_history(endpoint, history, thought, sequences):
    """A template that drops thoughts of earlier turns begins a new sequence only with history = "template"."""
    client = endpoint(f"{thought}one", "two", template=THOUGHTS, history=history)
    reply = ask(client).choices[0].message.model_dump()
    response = ask(client, [*USER, reply, {"role": "user", "content": "more"}])
    kept = thought if history == "keep" else ""
    expected = f"<|user|>hello</s>\n<|assistant|>\n{kept}one</s>\n<|user|>more</s>\n<|assistant|>\n"
    assert client.tokenizer.decode_all(response.brorl["prompt_token_ids"]) == expected
    assert len(client.sequences.rows()) == sequences
