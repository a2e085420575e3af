"""Stop strings against brute force, which decodes every prefix and ends at the first with a stop string."""

from __future__ import annotations

import io
import json
import random

import pytest
import sentencepiece
import tokenizers
import torch
from tiny_tokenizer import train_sentencepiece
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.rollout.native.stopping import StopCriteria

TAGS = ["<think>", "</think>", "<answer>", "</answer>", "<|im_end|>", "<pad>"]
WORDS = ["the", "answer", "is", "step", "so", "User", "done", "stop", "ab", "abc", "12", "7"]
WORDS += ["naïve", "да", "привет", "你好", "答案"]
STRINGS = [
    "\n", "\n\n", " ", "  ", " the", "the ", " answer ", "\nUser:", "User: ", "Answer: ", "a", "ab", "ba", "aba", "12",
    "你好", "答案是四二", "你好你好你好", "龘靐齉爩", "привет", "двенадцатьбук", "да ", " да", "é", "naïve", "ü ",
    "🙂", "🙂🙃😀😁", "👩‍👩‍👧", " 🙂 ", "a🙂b", "</answer>", "<|im_end|>", "</think>\n", " </answer>", "<pad>",
    "</s>", "x</answer>y", "the answer is 42.", "Final answer: the number of steps is 12, so stop here",
]  # fmt: skip
PAIRS = [("ab", "abc"), ("b", "aab"), ("the ", "the answer"), ("🙂", "🙂🙃"), ("</answer>", "\n"), ("答", "案是")]


def texts():
    draw = random.Random(0)
    return [" ".join(draw.choices([*WORDS, "User:\n", "Answer: 42.", "aba"], k=8)) for _ in range(300)]


def save(directory, inner, **settings):
    inner.save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", **settings}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names})
    )
    return load_tokenizer(directory)


def byte_level(directory):
    """Return a byte-level BPE: a character outside ASCII takes a token per byte, unless a merge was learned."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", *TAGS]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(texts(), trainer)
    return save(directory, inner)


def llama(directory):
    """Return a Llama tokenizer: U+2581 for spaces, byte tokens for unknown characters, first space dropped."""
    pieces = ["▁", "▁▁", "▁▁▁▁", *"abcdefghijklmnopqrstuvwxyz0123456789:.#", "▁the", "▁answer", "▁a", "ab", "User"]
    vocab = ["<unk>", "<s>", "</s>", *TAGS, *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    inner = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(vocab)}, [], unk_token="<unk>", byte_fallback=True)
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>", *TAGS])
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return save(directory, inner, unk_token="<unk>")


def pieces(directory):
    """Return sentencepiece as this project trains it."""
    return train_sentencepiece(texts(), directory, 600)


def own_pieces(directory):
    """Return default sentencepiece: a space before each text, white space removed, tags as control pieces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*texts(), *STRINGS]),
        model_writer=model,
        vocab_size=700,
        hard_vocab_limit=False,
        byte_fallback=True,
        control_symbols=[tag for tag in TAGS if tag != "<pad>"],
        pad_id=3,
        minloglevel=2,
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    return load_tokenizer(directory)


KINDS = [byte_level, llama, pieces, own_pieces]


@pytest.fixture(scope="module", params=KINDS, ids=lambda make: make.__name__)
def tokenizer(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("tokenizer"))


def brute_force(decode, strings, ids):
    return next((n for n in range(1, len(ids) + 1) if any(s in decode(ids[:n]) for s in strings)), None)


def ids_with(tokenizer, text):
    """Return the ids of a text in which tags are special tokens."""
    parts = []
    rest = text
    tags = {tag: [i for i in range(3, 12) if tokenizer.decode_all([i]) == tag] for tag in TAGS}
    while rest:
        begin, tag = min(((rest.find(t), t) for t, ids in tags.items() if ids and t in rest), default=(len(rest), ""))
        parts += [*tokenizer.encode(rest[:begin]), *tags.get(tag, [])]
        rest = rest[begin + len(tag) :]
    return parts


def responses(tokenizer, strings, draw):
    """Return token ids of texts around the stop strings, with random tokens in between."""
    any_id = lambda: draw.randrange(tokenizer.vocab_size + 3)  # noqa: E731  some ids are outside of the vocabulary
    for s in strings:
        before, after = (" ".join(draw.choices(WORDS, k=draw.randint(0, 25))) for _ in range(2))
        for write in (tokenizer.encode, lambda text: ids_with(tokenizer, text)):
            yield write(before + s + after)
            yield [*write(before), *write(s), *write(after)]  # the tokenizer would choose other tokens
            # Tokens that add no text, and parts of characters.
            whole = write(f"{before} {s}{after}")
            cut = draw.randrange(len(whole) + 1)
            yield whole[:cut] + [draw.choice([tokenizer.vocab_size, any_id()])] * draw.randint(1, 9) + whole[cut:]
        part = tokenizer.encode(s)
        yield [any_id() for _ in range(20)] + part[draw.randrange(len(part) or 1) :] + part + [any_id()]
    yield [any_id() for _ in range(40)]


def test_a_response_ends_where_brute_force_ends_it(tokenizer):
    draw = random.Random(1)
    wrong = []
    ended = 0
    for decode in (tokenizer.decode, tokenizer.decode_all):
        for strings in [*((s,) for s in STRINGS), *PAIRS]:
            stops = StopCriteria((), strings, decode)
            for ids in responses(tokenizer, strings, draw):
                expected = brute_force(decode, strings, ids)
                ended += expected is not None
                if stops.first_end(torch.tensor(ids)) != expected:
                    wrong.append((strings, ids))
    assert not wrong, f"{len(wrong)}: {wrong[0]}"
    assert ended > 200


def test_long_runs_of_byte_tokens(tmp_path):
    """Llama's decoder accepts a run of byte tokens only as a whole, so a window must not start within a character."""
    tokenizer = llama(tmp_path)
    for filler in ("你", "д", "🙂", "é你🙂"):
        for string in ("答案是四二", "двенадцатьбукв", "🙃😀😁😂", "\n"):
            ids = tokenizer.encode(filler * 40 + string + filler)
            expected = brute_force(tokenizer.decode, (string,), ids)
            assert expected is not None
            assert StopCriteria((), (string,), tokenizer.decode).first_end(torch.tensor(ids)) == expected


def test_most_tokens_decode_a_short_window(tmp_path):
    """The cost of a response is linear: only the call that confirms an end decodes all of it."""
    tokenizer = byte_level(tmp_path)
    lengths = []

    def decode(ids):
        lengths.append(len(ids))
        return tokenizer.decode(ids)

    ids = tokenizer.encode("the answer 你好 is\n" * 100 + "stop")
    assert StopCriteria((), ("\nstop", "\n\n"), decode).first_end(torch.tensor(ids)) == len(ids)
    assert sorted(lengths)[-2] <= 20


def test_rows_end_independently(tmp_path):
    """Rows that are decoded together end independently; a stop token ends a row, whatever its text."""
    tokenizer = byte_level(tmp_path)
    end = tokenizer.encode("q")[0]
    stops = StopCriteria((end,), ("ab", "答"), tokenizer.decode)
    rows = {4: "x ab", 0: "x 答 y", 5: "xq", 2: "a b"}  # by slot
    rows = {slot: tokenizer.encode(text) for slot, text in rows.items()}
    tokens = torch.zeros(6, 30, dtype=torch.int64)
    for row, ids in rows.items():
        tokens[row, : len(ids)] = torch.tensor(ids)
    ends = {}
    for n in range(1, 1 + max(map(len, rows.values()))):
        active = torch.tensor([row for row, ids in rows.items() if len(ids) >= n])
        produced = torch.full((6,), n)
        hits = stops.hit(tokens[active, n - 1], active, tokens, produced, torch.zeros_like(produced))
        for row, hit in zip(active.tolist(), hits, strict=True):
            if hit:
                ends.setdefault(row, n)
    assert ends == {4: len(rows[4]), 0: brute_force(tokenizer.decode, ("答",), rows[0]), 5: len(rows[5])}
