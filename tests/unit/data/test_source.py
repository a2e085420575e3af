from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from tiny_tokenizer import train_sentencepiece

from megatron_brorl.config.schema import DataConfig, MixtureConfig, TaskConfig
from megatron_brorl.data.prompts import sft_examples
from megatron_brorl.data.source import (
    FileSource,
    MixtureSource,
    load_sources,
    mixture_positions,
    prompts_digest,
    tokenizer_digest,
    whole_weights,
)
from megatron_brorl.errors import UserError
from megatron_brorl.types import Prompt

TASK = TaskConfig("chain_sum", 1.0, r"problem: (.*) =", {"min_terms": 2, "max_terms": 2, "max_digits": 1})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_sentencepiece(["0123456789 +-=q"] * 9, tmp_path_factory.mktemp("tokenizer"), 64)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), f"{i}", (i,), str(i), "exact") for i in range(count)]


def write(path: Path, count: int, start: int = 0) -> str:
    rows = [{"prompt": f"{i}+{i}", "answer": str(2 * i), "id": f"q{i}"} for i in range(start, start + count)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def ids(batch: list[Prompt]) -> list[str]:
    return [p.id for p in batch]


def test_every_epoch_has_another_permutation():
    source = FileSource(prompts(20), seed=3)
    epochs = [ids(source.prompts(20 * e, 20)) for e in range(50)]
    assert all(sorted(e) == sorted(map(str, range(20))) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 50
    assert len({e[0] for e in epochs}) > 10


def test_the_order_is_pinned():
    """A resumed run must keep its order, even with other versions of libraries."""
    assert ids(FileSource(prompts(6), seed=0).prompts(0, 12)) == list("135402354210")


def test_sources_of_files(tmp_path, tokenizer):
    config = DataConfig(
        train=(write(tmp_path / "a.jsonl", 5), write(tmp_path / "b.jsonl", 4, start=5)),
        held_out=(write(tmp_path / "h.jsonl", 3, start=8),),
        template="{prompt}=",
    )
    sources = load_sources(config, tokenizer, 100, seed=1)
    batch = sources.train.prompts(0, 9)
    assert sorted(p.text for p in batch) == [f"{i}+{i}=" for i in range(9)]
    assert all(p.answer == str(2 * int(p.id[1:])) for p in batch)
    assert ids(sources.held_out) == ["q8", "q9", "q10"]
    assert sources.report.splitlines() == [
        f"data.train: 5 prompts from {tmp_path}/a.jsonl",
        f"data.train: 4 prompts from {tmp_path}/b.jsonl",
        f"data.held_out: 3 prompts from {tmp_path}/h.jsonl",
        "data.held_out: 1 of 3 prompts also occur in data.train",
    ]
    assert sources.train.prompts(12, 4) != load_sources(config, tokenizer, 100, seed=2).train.prompts(12, 4)


def test_sources_of_a_mixture(tmp_path, tokenizer):
    files = [write(tmp_path / f"{name}.jsonl", 5, start=10 * i) for i, name in enumerate("abc")]
    parts = (MixtureConfig(files=(files[0],), weight=0.5), MixtureConfig(files=tuple(files[1:]), weight=1, name="rest"))
    config = DataConfig(mixture=parts, held_out=(files[2],), template="{prompt}=")
    sources = load_sources(config, tokenizer, 100, seed=1)
    prompts = sources.train.prompts(0, 30)
    assert Counter(p.id for p in prompts) == {f"q{i}": 2 for i in (*range(5), *range(10, 15), *range(20, 25))}
    assert sources.report.splitlines() == [
        f"data.mixture[0]: 5 prompts from {files[0]}",
        "data.mixture[0]: a has 33.3% of the prompts",
        f"data.mixture[1]: 5 prompts from {files[1]}",
        f"data.mixture[1]: 5 prompts from {files[2]}",
        "data.mixture[1]: rest has 66.7% of the prompts",
        f"data.held_out: 5 prompts from {files[2]}",
        "data.held_out: 5 of 5 prompts also occur in data.mixture",
    ]


def test_unusable_data_is_named_by_key_or_row(tmp_path, tokenizer):
    a, b = write(tmp_path / "a.jsonl", 3), write(tmp_path / "b.jsonl", 3, start=2)
    (tmp_path / "empty.jsonl").write_text("\n")
    one = MixtureConfig(files=(a,), weight=1)
    mixtures = {
        r"data\.mixture\[1\]\.files is empty; name data files": MixtureConfig(files=(), weight=1),
        r"data\.mixture\[1\]: .*'a'; give each its own name": MixtureConfig(files=(b,), weight=1, name="a"),
        r"data\.mixture\[1\]: id 'q2' is also in 'a'; give": MixtureConfig(files=(b,), weight=1),
        r"data\.mixture\[1\]\.verifier: .*'exakt'": MixtureConfig(files=(b,), weight=1, verifier="exakt"),
    }
    for config, named in (
        (DataConfig(), r"data: .*set data\.train .* or data\.tasks"),
        (DataConfig(train=(f"{tmp_path}/empty.jsonl",)), rf"{tmp_path}/empty\.jsonl: .*\(data\.train\)"),
        (DataConfig(train=(a, a)), rf"{a}:1: id 'q0' is taken by {a}:1"),
        (DataConfig(train=(a, b)), rf"{b}:1: id 'q2' is taken by {a}:3; give every row of data\.train its own"),
        (DataConfig(train=(a,), verifier="none", held_out=(a,)), rf'{a}:1: verifier "none" cannot evaluate'),
        *((DataConfig(mixture=(one, part)), named) for named, part in mixtures.items()),
    ):
        with pytest.raises(UserError, match=rf"^{named}[^\n]*$"):
            load_sources(config, tokenizer, 100, 0)


def test_generated_sources(tokenizer):
    config = DataConfig(tasks=(TASK,), held_out_prompts=64)
    sources, again, other = (load_sources(config, tokenizer, 100, seed=seed) for seed in (1, 1, 2))
    prompts = [p for step in range(20) for p in sources.train.prompts(32 * step, 32)]
    assert again.train.prompts(40, 8) == prompts[40:48]
    assert other.train.prompts(40, 8) != prompts[40:48]
    assert sources.held_out == other.held_out  # so that runs with different seeds can be compared
    assert len({p.text for p in sources.held_out}) == 64
    assert not {p.text for p in prompts} & {p.text for p in sources.held_out}
    assert len({*ids(prompts), *ids(sources.held_out)}) == 640 + 64
    assert sources.report == "data.tasks: endless prompts of chain_sum; 64 different ones held out"


def test_training_prompts_without_a_verifier(tokenizer, tmp_path):
    config = DataConfig(tasks=(TASK,), held_out_prompts=4)
    scored, unscored = (load_sources(replace(config, verifier=name), tokenizer, 100, 0) for name in ("exact", "none"))
    assert unscored.train.prompts(0, 8) == [replace(p, verifier="none") for p in scored.train.prompts(0, 8)]
    assert unscored.held_out == scored.held_out

    rows = (write(tmp_path / "rows.jsonl", 3),)
    mixture = (MixtureConfig(files=rows, weight=1, verifier="none"),)
    sources = load_sources(DataConfig(mixture=mixture, held_out=rows), tokenizer, 100, 0)
    assert [p.verifier for p in (sources.train.prompts(0, 1)[0], sources.held_out[0])] == ["none", "exact"]


def test_sft_examples(tokenizer):
    source = load_sources(DataConfig(tasks=(TASK,), held_out_prompts=4), tokenizer, 100, 0)
    batch = source.train.prompts(0, 8)
    for prompt, (prompt_ids, response) in zip(batch, sft_examples(batch, tokenizer), strict=True):
        assert tuple(prompt_ids) == prompt.token_ids
        assert list(response.token_ids) == [*tokenizer.encode(prompt.answer or ""), tokenizer.eos_id]
        assert all(response.trained)
        assert tokenizer.decode(response.token_ids) == str(eval(prompt.text))
    with_target = Prompt("a", "1+1", (1,), "2", "exact", target="0+2")
    assert sft_examples([with_target], tokenizer)[0][1].token_ids == (*tokenizer.encode("0+2"), tokenizer.eos_id)
    with pytest.raises(UserError, match="prompt 'a' has neither target nor reference answer"):
        sft_examples([Prompt("a", "x", (1,), None, "exact")], tokenizer)


WEIGHTS = [[1], [1, 1], [2, 3, 5], [1, 100], [333, 333, 334], [1, 2, 3, 4, 5, 6, 7]]


def sainte_lague(weights: list[int], count: int) -> list[tuple[int, int]]:
    """Give each seat to the party with the largest votes / (2 seats + 1), which is the definition."""
    seats = [0] * len(weights)
    order = []
    for _ in range(count):
        best = max(range(len(weights)), key=lambda i: (Fraction(weights[i], 2 * seats[i] + 1), -i))
        order.append((best, seats[best]))
        seats[best] += 1
    return order


def test_whole_weights():
    assert whole_weights([0.4, 0.35, 0.25]) == [8, 7, 5]
    assert whole_weights([0.1, 0.2, 0.3]) == [1, 2, 3]
    assert whole_weights([1e-7, 1.0]) == [1, 10**7]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_mixture_positions_follow_the_method_of_sainte_lague(weights):
    whole = sainte_lague(weights, 400)
    assert mixture_positions(weights, 0, 400) == whole
    for start in (1, 7, 123, 399):
        assert mixture_positions(weights, start, 30)[: 400 - start] == whole[start : start + 30]


def test_sources_of_a_mixture_have_independent_epochs_and_can_be_resumed():
    sizes = {"a": 5, "b": 3, "c": 40}
    sources = {name: [replace(p, text=name) for p in prompts(size)] for name, size in sizes.items()}
    whole = MixtureSource(sources, [0.5, 0.3, 0.2], seed=1).prompts(0, 200)
    assert Counter(p.text for p in whole) == {"a": 100, "b": 60, "c": 40}
    for name, rows in sources.items():
        prompt_ids = [p.id for p in whole if p.text == name]
        assert prompt_ids == ids(FileSource(rows, f"1:{name}").prompts(0, len(prompt_ids)))
    for start, size in ((0, 1), (3, 8), (60, 24)):
        assert MixtureSource(sources, [5, 3, 2], seed=1).prompts(start, size) == whole[start : start + size]
    assert MixtureSource(sources, [5, 3, 2], seed=2).prompts(0, 200) != whole


PROMPT = Prompt("a", "1+1=", (3, 4), "2", "exact", {"b": 1, "a": [2.5, None]})


@pytest.mark.parametrize(
    "change",
    [{"id": "b"}, {"token_ids": (3, 5)}, {"answer": None}, {"verifier": "x"}, {"metadata": {}}, {"columns": {"b": 2}}],
)
def test_digests_of_prompts(change):
    changed = replace(PROMPT, **change)
    assert prompts_digest([PROMPT]) != prompts_digest([changed])
    assert prompts_digest([PROMPT, changed]) != prompts_digest([changed, PROMPT])
    assert prompts_digest([PROMPT]) == prompts_digest([replace(PROMPT, metadata={"a": [2.5, None], "b": 1})])


def test_digests_of_tokenizers(tmp_path):
    train_sentencepiece(["abc", "1+1=2"] * 20, tmp_path, 40)
    before = tokenizer_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert tokenizer_digest(tmp_path) == before
    path = tmp_path / "tokenizer.model"
    swapped = path.read_bytes().replace(b"\x0a\x01a", b"\x0a\x01?").replace(b"\x0a\x01b", b"\x0a\x01a")
    path.write_bytes(swapped.replace(b"\x0a\x01?", b"\x0a\x01b"))
    digests = [before, tokenizer_digest(tmp_path)]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    digests.append(tokenizer_digest(tmp_path))
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    ("metadata", "task"),
    [({}, "exact"), ({"source_dataset": "gcd"}, "gcd"), ({"source_dataset": "gcd", "task": "carry"}, "carry")],
)
def test_task_of_a_row(tokenizer, tmp_path, metadata, task):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1", "answer": "2", "metadata": metadata}) + "\n")
    config = DataConfig(train=(str(tmp_path / "rows.jsonl"),), verifier="exact")
    assert load_sources(config, tokenizer, 100, 0).train.prompts(0, 1)[0].task == task
