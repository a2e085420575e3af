"""The endpoint with the openai package. A function in place of the engine gives the completions."""

from __future__ import annotations

import asyncio
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import openai
import pytest
import torch
from unit.agents.test_agent_rollouts import TEMPLATE, chat_functions
from unit.data.test_call_formats import CODER, LLAMA
from unit.data.test_tokenizers import make_hf

from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.rollout.agents.sequences import Sequences
from megatron_brorl.rollout.agents.server import AgentServer, Endpoint, Limits

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
    """Yield a function that returns a client with its endpoint, and the calls that it has submitted."""
    with contextlib.ExitStack() as stack:
        yield lambda *texts, **options: stack.enter_context(opened(tmp_path, texts, **options))


@contextlib.contextmanager
def opened(folder, texts, template=TEMPLATE, answers=True, format="hermes", history="keep", **limits):
    tokenizer = load_tokenizer(make_hf(folder / "hf", chat_template=template))
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

    numbers = {"prompt_tokens": 400, "call_tokens": 50, "calls": 9, **limits}
    limits = Limits(format=format, decode=tokenizer.decode, stop_ids=(1,), stop_strings=(), **numbers)
    sequences = Sequences(*chat_functions(tokenizer), history, 0)
    warnings = []
    server = AgentServer()
    with contextlib.closing(server):
        sampling = {"temperature": 1.0, "top_p": 1.0}
        server.endpoints["key"] = Endpoint(sequences, limits, sampling, submit, warnings.append)
        client = openai.OpenAI(base_url=server.url, api_key="key")
        client.submitted, client.warnings, client.finish, client.server = submitted, warnings, finish, server
        client.tokenizer, client.sequences = tokenizer, sequences
        with client:
            yield client


def ask(client, messages=USER, **options):
    return client.chat.completions.create(model="policy", messages=messages, **options)


FORMATS = [
    ("hermes", TEMPLATE, f"Let me see.\n{CALL}{CALL}", {"city": "Oslo", "days": 2}, 2),
    # The schema says that a city is a string.
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


def test_a_malformed_call_is_text(endpoint):
    client = endpoint('<tool_call>{"name": "weather", }</tool_call>')
    choice = ask(client, tools=[WEATHER]).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.content == '<tool_call>{"name": "weather", }</tool_call>'


def test_without_tools_a_call_is_text(endpoint):
    for options in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        assert ask(endpoint(CALL), **options).choices[0].message.content == CALL


def test_fields_of_a_response(endpoint):
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
    assert "temperature" in client.warnings[0]
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


LIMITS = [
    ({"call_tokens": 20}, {}, 20),
    ({}, {"max_tokens": 7}, 7),
    ({}, {"max_completion_tokens": 8}, 8),
]


@pytest.mark.parametrize(("limits", "options", "expected"), LIMITS)
def test_the_smallest_limit_of_tokens_counts(endpoint, limits, options, expected):
    client = endpoint("x", **limits)
    ask(client, **options)
    assert client.submitted.get().limit == expected


def test_the_limit_of_calls_ends_them(endpoint):
    client = endpoint("x", "y", "z", calls=2)
    ask(client)
    ask(client)
    with pytest.raises(openai.BadRequestError) as e:
        ask(client)
    assert e.value.body["code"] == "max_calls"


def test_a_key_expires_with_its_rollout(endpoint):
    client = endpoint("x")
    client.server.endpoints.clear()
    with pytest.raises(openai.AuthenticationError):
        ask(client)


def test_a_retry_waits_for_the_call_that_it_repeats(endpoint):
    """The first request ends before its completion, which the retry receives. Nothing is sampled twice."""
    client = endpoint(answers=False)

    async def run():
        own = openai.AsyncOpenAI(base_url=client.base_url, api_key="key", timeout=0.5, max_retries=0)
        with pytest.raises(openai.APITimeoutError):
            await ask(own)
        retry = asyncio.create_task(ask(own.with_options(timeout=60), extra_headers={"x-stainless-retry-count": "1"}))
        call = client.submitted.get()
        client.finish(call, "late")
        return call, await retry

    call, response = asyncio.run(run())
    assert response.choices[0].message.content == "late"
    assert call.delivered
    assert client.submitted.empty()


def test_a_completion_that_nobody_received_is_not_in_a_sequence(endpoint):
    client = endpoint(answers=False)
    with pytest.raises(openai.APITimeoutError):
        ask(client.with_options(timeout=0.5, max_retries=0))
    client.finish(client.submitted.get(), "late")
    assert client.sequences.rows() == []


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


def test_smolagents(endpoint):
    """An agent of a framework calls a tool and gives an answer."""
    smolagents = pytest.importorskip("smolagents")
    answer = '<tool_call>{"name": "final_answer", "arguments": {"answer": "rainy"}}</tool_call>'
    client = endpoint(CALL, answer, prompt_tokens=10000)
    asked = []

    @smolagents.tool
    def weather(city: str, days: int) -> str:
        """Return the weather.

        Args:
            city: name of the city
            days: number of days
        """
        asked.append((city, days))
        return "rain"

    policy = smolagents.OpenAIServerModel("policy", client.server.url, api_key="key", tool_choice="auto")
    agent = smolagents.ToolCallingAgent([weather], policy, verbosity_level=0)
    assert agent.run("How is the weather in Oslo?") == "rainy"
    assert asked == [("Oslo", 2)]
    # smolagents writes calls into the conversation as text.
    assert [len(row) for row in client.sequences.rows()] == [1, 1]
