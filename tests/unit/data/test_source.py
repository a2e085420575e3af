from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron_brorl.config.schema import DataConfig, MixtureConfig, TaskConfig
from megatron_brorl.data.solved import solved_examples
from megatron_brorl.data.source import FileSource, load_sources
from megatron_brorl.data.tokenizers import Tokenizer, train_sentencepiece
from megatron_brorl.errors import UserError
from megatron_brorl.types import Prompt

TASK = TaskConfig("chain_sum", 1.0, r"problem: (.*) =", {"min_terms": 2, "max_terms": 2, "max_digits": 1})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_sentencepiece(["0123456789 +-=q"] * 9, tmp_path_factory.mktemp("tokenizer"), 64)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), f"{i}", (i,), str(i), "exact") for i in range(count)]


def write(path: Path, count: int, start: int = 0) -> str:
    rows = [{"prompt": f"{i}+{i}", "answer": str(2 * i), "id": f"q{i}"} for i in range(start, start + count)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def ids(batch: list[Prompt]) -> list[str]:
    return [p.id for p in batch]


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    source = FileSource(prompts(20), seed=3)
    epochs = [ids(source.take(20 * e, 20)) for e in range(50)]
    everything = sorted(map(str, range(20)))
    assert all(sorted(e) == everything for e in epochs)
    assert len({tuple(e) for e in epochs}) == 50
    first = Counter(e[0] for e in epochs)
    assert len(first) > 10  # whoever comes first changes


def test_steps_cross_epochs() -> None:
    source = FileSource(prompts(7), seed=3)
    flat = [i for step in range(21) for i in ids(source.take(5 * step, 5))]
    assert flat == [i for epoch in range(15) for i in ids(source.take(7 * epoch, 7))]
    assert set(Counter(flat).values()) == {15}
    assert sorted(Counter(ids(FileSource(prompts(3), 0).take(0, 9))).values()) == [3, 3, 3]  # a step of three epochs


def test_a_step_is_a_pure_function_of_its_number() -> None:
    source = FileSource(prompts(7), seed=3)
    for step in range(5):
        source.take(4 * step, 4)
    assert source.take(20, 4) == FileSource(prompts(7), seed=3).take(20, 4)
    assert source.take(20, 4) != FileSource(prompts(7), seed=4).take(20, 4)


def test_the_order_is_pinned() -> None:
    """A resumed run must see the order it began with, whatever was upgraded in between."""
    assert ids(FileSource(prompts(6), seed=0).take(0, 12)) == list("135402354210")


def test_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = DataConfig(
        train=(write(tmp_path / "a.jsonl", 5), write(tmp_path / "b.jsonl", 4, start=5)),
        held_out=(write(tmp_path / "h.jsonl", 3, start=8),),
        template="{prompt}=",
    )
    sources = load_sources(config, tokenizer, 100, seed=1)
    batch = sources.train.take(0, 9)
    assert sorted(p.text for p in batch) == [f"{i}+{i}=" for i in range(9)]
    assert all(p.answer == str(2 * int(p.id[1:])) for p in batch)
    assert ids(sources.held_out) == ["q8", "q9", "q10"]
    assert sources.report.splitlines() == [
        f"data.train: 5 prompts from {tmp_path}/a.jsonl",
        f"data.train: 4 prompts from {tmp_path}/b.jsonl",
        f"data.held_out: 3 prompts from {tmp_path}/h.jsonl",
        "data.held_out: 1 of 3 prompts also occur in data.train",
    ]
    assert sources.train.take(12, 4) != load_sources(config, tokenizer, 100, seed=2).train.take(12, 4)


def test_wrong_data_is_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"nothing to train on; give data\.train .* or data\.tasks"):
        load_sources(DataConfig(), tokenizer, 100, 0)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(UserError, match=r"empty\.jsonl: the file has no rows \(data\.train\)"):
        load_sources(DataConfig(train=(str(empty),)), tokenizer, 100, 0)
    twice = (write(tmp_path / "a.jsonl", 5), write(tmp_path / "b.jsonl", 5, start=4))
    with pytest.raises(UserError, match=r"b\.jsonl:1: id 'q4' is taken by .*a\.jsonl:5; give every row of data\.train"):
        load_sources(DataConfig(train=twice), tokenizer, 100, 0)


def test_mixtures(tmp_path: Path, tokenizer: Tokenizer) -> None:
    files = [write(tmp_path / f"{name}.jsonl", 5, start=10 * i) for i, name in enumerate("abc")]
    parts = (MixtureConfig(files=(files[0],), weight=0.5), MixtureConfig(files=tuple(files[1:]), weight=1, name="rest"))
    config = DataConfig(mixture=parts, held_out=(files[2],), template="{prompt}=")
    sources = load_sources(config, tokenizer, 100, seed=1)
    taken = sources.train.take(0, 30)
    assert Counter(p.id for p in taken) == {f"q{i}": 2 for i in (*range(5), *range(10, 15), *range(20, 25))}
    assert sources.report.splitlines() == [
        f"data.mixture[0]: 5 prompts from {files[0]}",
        "data.mixture[0]: a has 33.3% of the prompts",
        f"data.mixture[1]: 5 prompts from {files[1]}",
        f"data.mixture[1]: 5 prompts from {files[2]}",
        "data.mixture[1]: rest has 66.7% of the prompts",
        f"data.held_out: 5 prompts from {files[2]}",
        "data.held_out: 5 of 5 prompts also occur in data.mixture",
    ]


def test_a_source_has_a_verifier_for_rows_that_name_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1", "answer": "1"}\n{"prompt": "2", "answer": "2", "verifier": "exact"}\n')
    mixture = (MixtureConfig(files=(str(path),), weight=1, verifier="format"),)
    sources = load_sources(DataConfig(mixture=mixture), tokenizer, 100, 0)
    assert {p.text: p.verifier for p in sources.train.take(0, 2)} == {"1": "format", "2": "exact"}


def test_mistakes_in_a_mixture(tmp_path: Path, tokenizer: Tokenizer) -> None:
    a, b = write(tmp_path / "a.jsonl", 3), write(tmp_path / "b.jsonl", 3, start=2)
    one = MixtureConfig(files=(a,), weight=1)
    for second, message in (
        (MixtureConfig(files=(), weight=1), "files is empty; name JSONL or Parquet files"),
        (MixtureConfig(files=(b,), weight=1, name="a"), "there is another source called 'a'"),
        (MixtureConfig(files=(b,), weight=1), "id 'q2' is taken by a row of 'a'; give every row its own id"),
        (MixtureConfig(files=(b,), weight=1, verifier="exakt"), "verifier: no verifier is called 'exakt'"),
    ):
        with pytest.raises(UserError) as e:
            load_sources(DataConfig(mixture=(one, second)), tokenizer, 100, 0)
        assert str(e.value).startswith("data.mixture[1]")
        assert message in str(e.value)
        assert "\n" not in str(e.value)


def test_generated_sources(tokenizer: Tokenizer) -> None:
    config = DataConfig(tasks=(TASK,), held_out_prompts=64)
    sources = load_sources(config, tokenizer, 100, seed=1)
    again = load_sources(config, tokenizer, 100, seed=1)
    other = load_sources(config, tokenizer, 100, seed=2)
    assert len({p.text for p in sources.held_out}) == 64
    for step in range(5):
        sources.train.take(8 * step, 8)
    assert sources.train.take(40, 8) == again.train.take(40, 8)
    assert sources.train.take(40, 8) != other.train.take(40, 8)
    assert sources.held_out == other.held_out  # so that runs of several seeds can be compared
    seen = {p.text for step in range(20) for p in sources.train.take(32 * step, 32)}
    assert not seen & {p.text for p in sources.held_out}
    assert [p for s in (0, 4) for p in sources.train.take(s, 4)] == sources.train.take(0, 8)
    train_ids = [p.id for step in range(20) for p in sources.train.take(32 * step, 32)]
    assert len(set(train_ids) | set(ids(sources.held_out))) == 640 + 64
    assert sources.report == "data.tasks: endless prompts of chain_sum; 64 different ones held out"


def test_solved_examples(tokenizer: Tokenizer) -> None:
    source = load_sources(DataConfig(tasks=(TASK,), held_out_prompts=4), tokenizer, 100, 0)
    batch = source.train.take(0, 8)
    for prompt, (prompt_ids, response) in zip(batch, solved_examples(batch, tokenizer), strict=True):
        assert tuple(prompt_ids) == prompt.token_ids
        assert response == [*tokenizer.encode(prompt.answer or ""), tokenizer.eos_id]
        assert tokenizer.decode(response) == str(eval(prompt.text))
    with pytest.raises(UserError, match="prompt 'a' has neither target nor reference answer"):
        solved_examples([Prompt("a", "x", (1,), None, "exact")], tokenizer)
