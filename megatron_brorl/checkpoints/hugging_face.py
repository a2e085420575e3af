"""Hugging Face directories: each rank reads its part, and rank 0 writes the tensors of the weight sync."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_brorl.checkpoints import safetensors_files
from megatron_brorl.checkpoints.model_card import CARD
from megatron_brorl.checkpoints.safetensors_files import INDEX, TYPES
from megatron_brorl.data.sentencepiece import write_tokenizer_json
from megatron_brorl.data.tokenizers import GENERATION, load_tokenizer, stop_ids, transformers_stop_ids
from megatron_brorl.errors import UserError, shown, warn
from megatron_brorl.families.shape import CONFIG, WEIGHTS, ModelShape, read_shape
from megatron_brorl.files import read_object, sha256
from megatron_brorl.models.weights import names
from megatron_brorl.models.weights.layouts import WeightEntry, to_local

HEAD = "lm_head.weight"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")


class Checkpoint:
    """The tensors of a Hugging Face directory, read on demand.

    The files are those that transformers loads: model.safetensors has precedence over an index, and all tensors of a
    shard that the index names are used, even those that the index does not list.
    """

    def __init__(self, directory: Path) -> None:
        """Raises UserError if the directory has no such files, or one of them is missing or damaged."""
        self.directory = directory
        self.files: dict[str, Path] = {}  # by tensor
        self.types: dict[str, str] = {}  # by tensor, as in TYPES
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._slices: dict[str, tuple[str, int, slice]] = {}  # stored tensor, expert and rows, by tensor of an expert
        for name in _weight_files(directory):
            path = directory / name
            try:
                with safe_open(path, framework="pt") as file:
                    for stored in file.keys():  # noqa: SIM118  it is not a dict
                        lazy = file.get_slice(stored)
                        for tensor, shape in self._split_experts(stored, tuple(lazy.get_shape())).items():
                            if tensor in self.files:
                                raise UserError(
                                    f"{directory}: {tensor} is stored in both {self.files[tensor].name} and {name}; "
                                    "download the checkpoint again"
                                )
                            self.files[tensor] = path
                            self.types[tensor] = lazy.get_dtype()
                            self.shapes[tensor] = shape
            except (OSError, SafetensorError) as e:
                raise UserError(f"{path}: not a readable safetensors file: {shown(e)}") from None

    def _split_experts(self, stored: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors in a stored tensor. The experts of a layer give one per expert and weight.

        transformers 5 writes [experts, 2 x ffn, hidden] and [experts, hidden, ffn] unless it converts them back.
        """
        before, _, kind = stored.rpartition(".experts.")
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        if not names or len(shape) != 3:
            return {stored: shape}
        rows = shape[1] // len(names)
        slices = {
            f"{before}.experts.{expert}.{name}.weight": (stored, expert, slice(i * rows, (i + 1) * rows))
            for expert, (i, name) in product(range(shape[0]), enumerate(names))
        }
        self._slices |= slices
        return dict.fromkeys(slices, (rows, shape[2]))

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in its stored type."""
        with safe_open(self.files[name], framework="pt") as file:
            stored, *expert_and_rows = self._slices.get(name, (name,))
            return file.get_slice(stored)[tuple(expert_and_rows)] if expert_and_rows else file.get_tensor(name)

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise UserError unless the files hold these tensors, unquantized; an LM head may be stored in addition."""
        missing = [name for name in shapes if name not in self.files]
        if missing:
            raise UserError(
                f"{self.directory}: {len(missing)} tensors of config.json's model are missing, for example {missing[0]}"
            )
        known = {HEAD} | shapes.keys()
        unknown = [n for n in self.files if n not in known and not n.endswith("rotary_emb.inv_freq")]
        if unknown:
            raise UserError(f"{self.directory}: unknown tensor {unknown[0]}; does config.json belong to it?")
        for name, kind in self.types.items():
            if name in known and kind not in TYPES:
                raise UserError(f"{self.directory}: {name} is of type {kind}: only unquantized checkpoints")

    def check_tied(self, shape: ModelShape) -> None:
        """Raise UserError if config.json ties the LM head to the embedding, but the files store a different head.

        Transformers 5 would use both tensors, and earlier versions would use only the embedding.
        """
        if not shape.tied or HEAD not in self.files:
            return
        entry = names.entries(shape, pp_size=1)[0]
        (embedding,) = self.read(entry)
        (head,) = self.read(replace(entry, hf=(HEAD,)))
        common = torch.promote_types(embedding.dtype, head.dtype)
        if not torch.equal(embedding.to(common), head.to(common)):
            raise UserError(
                f"{self.directory}: stores a {HEAD} unlike {entry.hf[0]}, but config.json says tie_word_embeddings = "
                f"true: set that to false to use both, or remove {HEAD} from the files"
            )

    def dtype(self, entry: WeightEntry) -> torch.dtype:
        """Return the type of an entry's tensors, after `check`. Raises UserError if they differ."""
        types = {self.types[name] for name in entry.hf}
        if len(types) > 1:
            kinds = ", ".join(sorted(types))
            raise UserError(
                f"{self.directory}: {' and '.join(entry.hf)} differ in type ({kinds}); they must have the same"
            )
        return TYPES[types.pop()]

    def read(self, entry: WeightEntry) -> list[Tensor]:
        """Return the full tensors of an entry. Raises UserError if a shape differs from config.json's."""
        self.dtype(entry)
        for name, shape in zip(entry.hf, entry.hf_shapes, strict=True):
            if self.shapes[name] != shape:
                raise UserError(
                    f"{self.directory}: {name} has shape {list(self.shapes[name])}, config.json implies {list(shape)}"
                )
        return [self.tensor(name) for name in entry.hf]


def open_checked(directory: Path, shape: ModelShape) -> Checkpoint:
    """Return the tensors of a directory. Raises UserError unless they are those of the model in its config.json."""
    checkpoint = Checkpoint(directory)
    checkpoint.check(names.hf_shapes(shape))
    checkpoint.check_tied(shape)
    return checkpoint


def weights_sha256(directory: Path) -> str:
    """Return the SHA-256 of the weight files, one after the other. Raises UserError if there are none."""
    return sha256(*(directory / name for name in _weight_files(directory)))


def _weight_files(directory: Path) -> list[str]:
    """Return the names of the files that hold the weights. Raises UserError if there are none."""
    if (directory / WEIGHTS).is_file():
        return [WEIGHTS]
    if not (directory / INDEX).is_file():
        raise UserError(
            f"{directory}: holds neither {WEIGHTS} nor {INDEX}; download the missing file, or convert pickled weights "
            "by transformers' AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )
    files = _shards(directory / INDEX)
    for file in files:
        if not (directory / file).is_file():
            raise UserError(f"{directory / file}: missing, but named in {INDEX}; download the checkpoint again")
    return files


def _shards(index: Path) -> list[str]:
    """Return the names of the files in an index. Raises UserError if the index or a file name in it is invalid."""
    weight_map = read_object(index, "download the checkpoint again").get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: not a safetensors index: weight_map is not an object")
    for name, file in weight_map.items():
        # A downloaded index must not point to files outside of its directory.
        if not isinstance(file, str) or not file.isprintable() or len(file) > 255 or Path(file).name != file:
            raise UserError(
                f"{index}: {shown(name)} is in {shown(file)}: expected the name of a file next to the index"
            )
    return sorted(set(weight_map.values()))


def load(
    actor: Any, shape: ModelShape, directory: str | Path, own: Sequence[str] = (), keep: bool = False
) -> dict[str, Tensor]:
    """Fill this rank's stage, a models.gpt.Actor, from a Hugging Face directory, converting to the parameters' dtype.

    own: parameters that no Hugging Face directory has; they stay unchanged. keep: return this rank's part of each
    tensor in the dtype of the file, by the module's own parameter names. Raises UserError if the directory does not
    have the model of its config.json.
    """
    grid = actor.grid
    checkpoint = Checkpoint(Path(directory))
    checkpoint.check(names.hf_shapes(shape))
    if "output_layer.weight" not in own:
        checkpoint.check_tied(shape)
    parameters = {k: v for k, v in names.global_parameters(actor).items() if k not in own}

    local_names = {id(parameter): name for name, parameter in actor.named_parameters()}
    kept: dict[str, Tensor] = {}
    with torch.no_grad():
        for entry in names.entries(shape, grid.pp_size, actor.uses_te):
            targets = [parameters.pop(entry.megatron)] if entry.is_on(grid, shape.experts) else []
            if entry.layout == "vocab" and shape.tied and "output_layer.weight" in parameters:
                targets.append(parameters.pop("output_layer.weight"))  # the last stage's copy of a tied embedding
            if targets:
                weight = to_local(entry, checkpoint.read(entry), shape.kv_heads, grid.tp_rank, grid.tp_size)
                for target in targets:
                    target.copy_(weight)
                    if keep:
                        kept[local_names[id(target)]] = weight.to(target.device).contiguous()  # Megatron calls view()

    if parameters:
        raise AssertionError(f"parameters without a Hugging Face name: {sorted(parameters)}")
    return kept


def save(
    tensors: Iterable[tuple[str, Tensor]], source: str | Path, target: str | Path, dtype: str, card: str = ""
) -> bool:
    """Write a Hugging Face directory with config.json and tokenizer of `source`, and return whether weights differ.

    The files are written to a temporary directory, which is then renamed. tensors: named as in `source`. dtype:
    torch's name of the tensors' type ("float32"); the weights of `source` are converted to it and compared. card: the
    text of README.md, which is not copied from `source`. Raises ValueError if a tensor is missing or unknown.
    """
    source = Path(source)
    target = Path(target)
    shapes = names.hf_shapes(read_shape(source))
    original = Checkpoint(source)
    differs = False

    def compared() -> Iterator[tuple[str, Tensor]]:
        nonlocal differs
        for name, tensor in tensors:
            if not differs and name in original.files:
                differs = not original.tensor(name).to(tensor.dtype).equal(tensor.detach().cpu())
            yield name, tensor

    with atomic_directory(target) as aside:
        copy_companions(source, aside)
        add_generation_files(source, aside)
        config = read_object(source / CONFIG)
        config.pop("torch_dtype", None)  # the older name of the same key
        config["dtype"] = dtype
        (aside / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if card:
            (aside / CARD).write_text(card, encoding="utf-8")
        layout = {name: (shape, getattr(torch, dtype)) for name, shape in shapes.items()}
        safetensors_files.write(compared(), layout, aside)
    return differs


def copy_companions(source: Path, target: Path) -> None:
    """Copy config.json, the tokenizer and the other small files next to the weights."""
    for path in sorted(source.iterdir()):
        is_small = path.suffix in (".json", ".model", ".txt", ".jinja", ".py") and not path.name.endswith(".index.json")
        if is_small and path.is_file():
            shutil.copy2(path, target / path.name)
    if (templates := source / "additional_chat_templates").is_dir():
        shutil.copytree(templates, target / templates.name, dirs_exist_ok=True)


def add_generation_files(source: Path, target: Path) -> None:
    """Write to `target`, a copy of `source`, the files that let transformers read it and stop as the trainer does.

    These are tokenizer.json for a sentencepiece model, and a generation_config.json with all ids that end a response,
    unless the file of `source` has them. Prints a warning on stderr if the tokenizer cannot be loaded.
    """
    write_tokenizer_json(source, target)
    if not any((source / name).is_file() for name in TOKENIZERS):
        return
    generation = read_object(source / GENERATION) if (source / GENERATION).is_file() else None
    try:
        tokenizer = load_tokenizer(source)
        ids = stop_ids(source, tokenizer)
    except UserError as e:
        warn(f"no {GENERATION} written: {e}")
        return
    if generation is not None and transformers_stop_ids(source) == set(ids):
        return

    if generation is None:
        # A generation_config.json makes transformers ignore the BOS and padding ids in config.json.
        config = read_object(source / CONFIG) if (source / CONFIG).is_file() else {}
        tokenizer_ids = {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
        known_ids = {key: id if config.get(key) is None else config[key] for key, id in tokenizer_ids.items()}
        generation = {key: id for key, id in known_ids.items() if id is not None}
    generation["eos_token_id"] = ids[0] if len(ids) == 1 else list(ids)
    (target / GENERATION).write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a new directory next to `target` that replaces it at the end, or is removed after an error.

    An OSError without a file name gets the name of `target`, because errors of writing and syncing have none.
    """
    aside = target.with_name(f".{target.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        replace_directory(aside, target)
    except BaseException as e:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(e, OSError) and e.errno and e.filename is None:
            e.filename = str(target)
        raise


def replace_directory(aside: Path, target: Path) -> None:
    """Sync a finished directory and replace `target` by it. For a moment, neither may exist."""
    for path in aside.rglob("*"):
        if path.is_file():
            with path.open("rb") as f:
                os.fsync(f.fileno())
    if target.exists():
        replaced = target.with_name(f".{target.name}.old")
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
        aside.rename(target)
        shutil.rmtree(replaced)
    else:
        aside.rename(target)
    parent = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
