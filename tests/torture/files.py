"""Spoiled files: models, tokenizers, rows, logs, records and checkpoints."""

from __future__ import annotations

import functools
import json
import random
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import tiny
from torture.mutations import spoil_bytes, spoil_json

from megatron_brorl.checkpoints import folders
from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.checkpoints.hugging_face import Checkpoint, copy_companions
from megatron_brorl.checkpoints.safetensors_files import INDEX
from megatron_brorl.cli.memory_plan import Machines
from megatron_brorl.cli.memory_plan import plan_stage as plan
from megatron_brorl.cli.run_folder import check_fingerprint, fingerprint
from megatron_brorl.config.schema import Config
from megatron_brorl.data.prompts import Verifiers, read_rows, render
from megatron_brorl.data.stop_ids import stop_ids
from megatron_brorl.data.tokenizers import load_tokenizer, train_sentencepiece
from megatron_brorl.metrics import METRICS_FILE, read_metrics
from megatron_brorl.model_shape import CONFIG, WEIGHTS, read_shape
from megatron_brorl.models.hf_names import hf_shapes
from megatron_brorl.ops.rope import inverse_frequencies
from megatron_brorl.record import files as record_files
from megatron_brorl.record.schema import GROUPS, ROLLOUTS
from megatron_brorl.report import rollouts as recorded
from megatron_brorl.report.comparison import read_answers
from megatron_brorl.train.state import saved

Exercise = Callable[[], object]
Target = Callable[[Path, random.Random], Exercise]

ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)
ROWS = [
    {"prompt": "1+1=", "answer": "2", "id": "a", "verifier": "exact", "metadata": {"x": [1, 2.5, None]}},
    {"prompt": "1+2=", "answer": "3", "id": "b"},
    {"prompt": "abc", "answer": None, "target": "cba"},
]
LOG = [
    {"prompt_id": "a", "step": 1, "rewards": [1.0, 0.0], "answers": ["1", "2"], "lengths": [3, 4]},
    {"prompt_id": 7, "answer": "42", "reward": 1.0, "token_ids": [1, 2], "log_probs": [-0.5, -0.1]},
    {"prompt_id": 7, "answer": "41", "reward": True, "token_ids": [1, 3], "log_probs": [-0.5, -1]},
]
METRICS = [
    {"step": i, "reward": 0.5, "kept": 0.25, "nonfinite": [], "time": {"step": 1.5, "generate": 0.5}} for i in range(4)
]
ANSWERS = [{"benchmark": "x", "id": str(i), "samples": 4, "right": i, "tokens": 5.5} for i in range(4)]
RUN = {"step": 3, "optimizers_that_have_stepped": [""], "updates": 6, "critic_updates": 0, "taken": 3,
       "prompts_taken": 12, "recently": [1.0, 2.0], "trained_s": 3.5, "stalls": [[0.5, 1]], "before": None,
       "spent": 4.0, "critic_steps": 0, "began": 0.0}  # fmt: skip


def file_targets() -> dict[str, Target]:
    """Every kind of file that the program reads, by name."""
    return {
        "config.json": _config_json,
        "safetensors": _safetensors,
        "index": _index,
        "tokenizer.model": _tokenizer_model,
        "tokenizer.json": _tokenizer_json,
        "generation_config": _generation_config,
        "companions": _companions,
        "rows.jsonl": functools.partial(_lines, ROWS, "rows.jsonl", _read_rows),
        "rows.parquet": _parquet,
        "metrics": functools.partial(_lines, METRICS, METRICS_FILE, read_metrics),
        "evaluation": functools.partial(_lines, ANSWERS, "evaluation.jsonl", read_answers),
        "record": _record,
        "checkpoint": _checkpoint,
    }


@functools.cache
def _made() -> Path:
    """A folder with one sound model of each kind, made once for this process."""
    root = Path(tempfile.mkdtemp(prefix="torture"))
    for family in tiny.FAMILIES:
        tiny.make_model(root / family, family, tied=family == "qwen2")
    train_sentencepiece(["abc", "1+1=2", "xyz <>|"] * 20, root / "pieces", 60)
    _write_tokenizer_json(root / "json")
    return root


def _write_tokenizer_json(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    directory.mkdir()
    vocab = {c: i for i, c in enumerate(["</s>", "<s>", *map(chr, range(33, 127)), "\u0120"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(directory / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "bos_token": "<s>",
        "chat_template": CHAT,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(told))


def _fresh(folder: Path, source: str) -> Path:
    shutil.rmtree(folder / "model", ignore_errors=True)
    return shutil.copytree(_made() / source, folder / "model")


def _spoil_file(path: Path, rng: random.Random) -> None:
    """Its JSON, or its bytes."""
    if rng.random() < 0.7:
        spoiled = spoil_json(json.loads(path.read_text()), rng)
        path.write_text(json.dumps(spoiled))
    else:
        path.write_bytes(spoil_bytes(path.read_bytes(), rng))


def _config_json(folder: Path, rng: random.Random) -> Exercise:
    model = _fresh(folder, rng.choice(sorted(tiny.FAMILIES)))
    raw = json.loads((model / CONFIG).read_text())
    if rng.random() < 0.4:
        raw["rope_parameters"] = dict(rng.choice([ROPE, LLAMA3]), rope_theta=1e4)
    (model / CONFIG).write_text(json.dumps(raw))
    _spoil_file(model / CONFIG, rng)

    def exercise() -> None:
        shape = read_shape(model)
        plan(Config(), shape, Machines(1, 1, gpu=0, here=False))
        inverse_frequencies(shape)
        Checkpoint(model).check(hf_shapes(shape))

    return exercise


def _read_model(model: Path) -> None:
    shape = read_shape(model)
    weights = Checkpoint(model)
    weights.check(hf_shapes(shape))
    weights.check_tied(shape)
    for name in weights.files:
        weights.tensor(name)


def _safetensors(folder: Path, rng: random.Random) -> Exercise:
    model = _fresh(folder, "qwen2")
    path = model / WEIGHTS
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.6:  # the header as JSON
        header = json.dumps(spoil_json(json.loads(data[8 : 8 + length]), rng)).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
    else:  # the length, the header or the tail as bytes
        cut = rng.choice([8, 8 + length, len(data)])
        path.write_bytes(spoil_bytes(data[:cut], rng) + data[cut:])
    return lambda: _read_model(model)


def _index(folder: Path, rng: random.Random) -> Exercise:
    model = _fresh(folder, "llama")
    names = list(tiny.weights(model))
    (model / WEIGHTS).rename(model / "part.safetensors")
    raw = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "part.safetensors")}
    if rng.random() < 0.3:
        raw["weight_map"][rng.choice(names)] = rng.choice(["../x", "/etc/passwd", "a/b", "", ".", "part.safetensors/"])
    (model / INDEX).write_text(json.dumps(raw))
    _spoil_file(model / INDEX, rng)
    return lambda: _read_model(model)


def _use_tokenizer(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode_prompt("1+1=", "<s>", "")
    tokenizer.decode([*ids, 5, 10**6])
    config = Config().data
    render("abc", tokenizer, config, 64, "row 1")
    stop_ids(model, tokenizer)


def _tokenizer_model(folder: Path, rng: random.Random) -> Exercise:
    model = _fresh(folder, "pieces")
    path = rng.choice(sorted(p for p in model.iterdir() if p.is_file()))
    path.write_bytes(spoil_bytes(path.read_bytes(), rng))
    return lambda: _use_tokenizer(model)


TEMPLATES = [
    "{% for i in range(10**12) %}x{% endfor %}",
    "{{ messages[7].content }}",
    "{{ raise_exception('a\nb') }}",
    "{% if %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ 'x' * 10**12 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 10**10**10 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ messages }}" * 3000,
    "",
]


def _tokenizer_json(folder: Path, rng: random.Random) -> Exercise:
    model = _fresh(folder, "json")
    if rng.random() < 0.3:
        path = model / "tokenizer_config.json"
        raw = json.loads(path.read_text())
        raw["chat_template"] = rng.choice(TEMPLATES) if rng.random() < 0.5 else _spoiled_text(CHAT, rng)
        path.write_text(json.dumps(raw))
    elif rng.random() < 0.8:  # the others show that it can be read
        _spoil_file(rng.choice(sorted(model.iterdir())), rng)

    def exercise() -> None:
        tokenizer = load_tokenizer(model)
        tokenizer.decode(tokenizer.encode_prompt("1+1=", "<s>", ""))
        tokenizer.apply_chat([{"role": "user", "content": "1+1 </s>"}])

    return exercise


def _spoiled_text(text: str, rng: random.Random) -> str:
    return spoil_bytes(text.encode(), rng).decode("utf-8", "replace")


def _generation_config(folder: Path, rng: random.Random) -> Exercise:
    model = _fresh(folder, "pieces")
    path = model / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [2, 3], "bos_token_id": 1, "temperature": 0.5}))
    _spoil_file(path, rng)
    return lambda: _use_tokenizer(model)


def _companions(folder: Path, rng: random.Random) -> Exercise:
    """Links out of the directory, folders and pipes with a companion's name: nothing from outside is copied."""
    model, target = _fresh(folder, "pieces"), folder / "target"
    secret = folder / "secret.json"
    secret.write_text("secret")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    link = model / rng.choice(["a.json", "b.txt", "chat_template.jinja"])
    kind = rng.randrange(4)
    if kind == 0:
        link.symlink_to(secret)
    elif kind == 1:
        link.symlink_to(link)
    elif kind == 2:
        link.mkdir()
    else:
        link.symlink_to(folder / "nowhere")

    def exercise() -> None:
        copy_companions(model, target)
        for path in target.iterdir():
            assert not path.is_symlink(), path
            assert "secret" not in path.read_text("utf-8", "replace"), path

    return exercise


def _lines(rows: list[Any], name: str, read: Callable[[Path], object], folder: Path, rng: random.Random) -> Exercise:
    """A file of JSON lines, one row spoiled, or some bytes."""
    path = folder / name
    spoiled = [spoil_json(row, rng) if rng.random() < 0.3 else row for row in rows]
    data = b"".join(json.dumps(row).encode() + b"\n" for row in spoiled)
    path.write_bytes(spoil_bytes(data, rng) if rng.random() < 0.4 else data)
    return lambda: read(path)


def _read_rows(path: Path) -> None:
    rows = read_rows(path, Verifiers())
    tokenizer = load_tokenizer(_made() / "pieces")
    for row in rows:
        render(row.prompt, tokenizer, Config().data, 64, row.where)


def _parquet(folder: Path, rng: random.Random) -> Exercise:
    path = folder / "rows.parquet"
    rows = [{"prompt": "abc", "answer": "1", "id": str(i), "metadata": json.dumps({"a": i})} for i in range(3)]
    if rng.random() < 0.5:
        other: list[Any] = [b"\xff", 1, 1.5, True, ["a"], {"a": 1}, None]
        column = rng.choice(["prompt", "answer", "id", "metadata", "verifier"])
        chosen = rng.choice(other)
        rows = [{**row, column: chosen} for row in rows]
    pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    if rng.random() < 0.7:
        path.write_bytes(spoil_bytes(path.read_bytes(), rng))
    return lambda: _read_rows(path)


def _record(folder: Path, rng: random.Random) -> Exercise:
    """A file of run.dir/rollouts with other columns, other types, or other bytes."""
    home = folder / "rollouts"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    moment = record_files.Moment("step", 3)
    group = {"group": 0, "prompt_id": "a", "rollouts": 2, "right": 1, "recorded": 2}
    rollouts = [{"group": 0, "prompt_id": "a", "sibling": i, "text": "x", "right": bool(i)} for i in range(2)]
    groups_table = pa.Table.from_pylist([group], GROUPS)
    if rng.random() < 0.2:
        key = rng.choice(sorted(group))
        groups_table = pa.Table.from_pylist([{**group, key: rng.choice(["x", 1.5, None, [1], {"a": 1}, True])}])
    if rng.random() < 0.1:
        groups_table = pa.table({"x": [1]})
    record_files.write_groups(home, moment, groups_table)
    record_files.write_rollouts(home, moment, 0, pa.Table.from_pylist(rollouts, ROLLOUTS))
    if rng.random() < 0.6:
        path = rng.choice(sorted(home.iterdir()))
        path.write_bytes(spoil_bytes(path.read_bytes(), rng))
    if rng.random() < 0.1:
        (home / "step_x.groups.parquet").write_text("")
    return lambda: recorded.read(home, "step", None, None).filtered(recorded.Filters())


def _checkpoint(folder: Path, rng: random.Random) -> Exercise:
    """What a resumed run looks at before any tensor is read."""
    root = folder / "checkpoints"
    shutil.rmtree(root, ignore_errors=True)
    step = root / "step_00000003"
    step.mkdir(parents=True)
    now = fingerprint(Config(), read_shape(_made() / "qwen2"), {})
    run = {**RUN, "fingerprint": now}
    (step / checkpoint.RUN).write_text(json.dumps(run))
    (root / checkpoint.LATEST).write_text("step_00000003\n")
    if rng.random() < 0.7:  # a consistent manifest of a run.json that is not ours
        _spoil_file(step / checkpoint.RUN, rng)
        folders.write_manifest(step)
    else:
        folders.write_manifest(step)
        latest = root / checkpoint.LATEST
        if rng.random() < 0.5:
            _spoil_file(step / folders.MANIFEST, rng)
        else:
            latest.write_bytes(rng.choice([spoil_bytes(latest.read_bytes(), rng), rng.randbytes(9), b""]))

    def exercise() -> None:
        found = checkpoint.find(root)
        if found:
            check_fingerprint(saved(found)["fingerprint"], now, found)

    return exercise
