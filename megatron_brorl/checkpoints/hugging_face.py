"""Hugging Face directories in and out: each rank reads only its part; rank 0 writes what the reshard stream yields."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.checkpoints import safetensors_files
from megatron_brorl.checkpoints.model_card import CARD
from megatron_brorl.checkpoints.safetensors_files import INDEX, TYPES, Tensors
from megatron_brorl.data.sentencepiece import write_tokenizer_json
from megatron_brorl.data.tokenizers import GENERATION, Tokenizer, load_tokenizer, stop_ids, transformers_stop_ids
from megatron_brorl.errors import UserError, shown
from megatron_brorl.json_files import read_object
from megatron_brorl.model_shape import CONFIG, WEIGHTS, ModelShape, read_shape
from megatron_brorl.models import hf_names
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.reshard.layout import Entry, to_local

HEAD = "lm_head.weight"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")


class Checkpoint:
    """The tensors of a Hugging Face directory by name; their data is read when it is asked for.

    transformers decides which files count: model.safetensors is taken before an index, and every tensor of a shard
    that the index names is loaded, whether the index lists that tensor or not.
    """

    def __init__(self, directory: Path) -> None:
        """Raises UserError where the directory has no such files, or one of them is missing or damaged."""
        self.directory = directory
        self.files: dict[str, Tensors] = {}  # of each tensor
        for name in _weight_files(directory):
            file = Tensors(directory / name)
            for tensor in file.shapes:
                # Different values would be two models; transformers takes the last, others the one of the index.
                if tensor in self.files:
                    raise UserError(
                        f"{directory}: {tensor} is stored in both {self.files[tensor].path.name} and {name}; "
                        "download the checkpoint again"
                    )
                self.files[tensor] = file

    def tensor(self, name: str) -> Tensor:
        """A tensor by its name in `files`, of the shape and type that it is stored in.

        Raises UserError where that type is none of TYPES.
        """
        file = self.files[name]
        if file.types[name] not in TYPES:
            raise UserError(f"{file.path}: {name} is of type {shown(file.types[name])}: only unquantised checkpoints")
        return file.read(name)

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise UserError unless the files hold exactly these tensors (an LM head may be stored all the same)."""
        missing = [name for name in shapes if name not in self.files]
        if missing:
            raise UserError(
                f"{self.directory}: {len(missing)} tensors of config.json's model are missing, for example {missing[0]}"
            )
        known = {HEAD} | shapes.keys()
        unknown = [n for n in self.files if n not in known and not n.endswith("rotary_emb.inv_freq")]
        if unknown:
            raise UserError(f"{self.directory}: unknown tensor {unknown[0]}; does config.json belong to it?")

    def check_tied(self, shape: ModelShape) -> None:
        """Raise UserError where config.json ties the LM head to the embedding, but another one is stored.

        Transformers 5 would use both, earlier versions the embedding alone. Equal values are one matrix to either.
        """
        if not shape.tied or HEAD not in self.files:
            return
        entry = hf_names.entries(shape, pipeline=1)[0]
        embedding, head = (self.read(e)[0] for e in (entry, replace(entry, hf=(HEAD,))))
        common = torch.promote_types(embedding.dtype, head.dtype)
        if not torch.equal(embedding.to(common), head.to(common)):
            raise UserError(
                f"{self.directory}: stores a {HEAD} unlike {entry.hf[0]}, but config.json says tie_word_embeddings = "
                f"true: set that to false to use both, as transformers 5 does, or take {HEAD} out of the files"
            )

    def dtype(self, entry: Entry) -> torch.dtype:
        """The type of an entry's tensors. Raises UserError where they differ, or are not floats of 16 bits or more."""
        found = {self.files[name].types[name] for name in entry.hf}
        kinds = ", ".join(sorted(found))
        if len(found) > 1:
            raise UserError(f"{self.directory}: {' and '.join(entry.hf)} differ in type ({kinds}); they must be alike")
        if kinds not in TYPES:
            raise UserError(f"{self.directory}: {entry.hf[0]} is of type {kinds}: only unquantised checkpoints")
        return TYPES[kinds]

    def read(self, entry: Entry) -> list[Tensor]:
        """The full tensors of an entry. Raises UserError where a shape is not what config.json says."""
        self.dtype(entry)
        tensors = []
        for name, shape in zip(entry.hf, entry.hf_shapes, strict=True):
            file = self.files[name]
            if file.shapes[name] != shape:
                raise UserError(
                    f"{self.directory}: {name} has shape {list(file.shapes[name])}, config.json implies {list(shape)}"
                )
            tensors.append(file.read(name))
        return tensors


def _weight_files(directory: Path) -> list[str]:
    """Return the names of the files that hold the weights. Raises UserError where there are none."""
    if (directory / WEIGHTS).is_file():
        return [WEIGHTS]
    if not (directory / INDEX).is_file():
        raise UserError(f"{directory}: holds neither {WEIGHTS} nor {INDEX}{_other_weights(directory)}")
    files = _shards(directory / INDEX)
    for file in files:
        if not (directory / file).is_file():
            raise UserError(f"{directory / file}: missing, but named in {INDEX}; download the checkpoint again")
    return files


def _shards(index: Path) -> list[str]:
    """Return the files that an index names. Raises UserError for what is no index."""
    weight_map = read_object(index, "download the checkpoint again").get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: not a safetensors index: weight_map is no object")
    for name, file in weight_map.items():
        # A downloaded index must not point to files outside of its directory.
        plain = isinstance(file, str) and file.isascii() and file.isprintable() and 0 < len(file) <= 255
        if not plain or Path(file).name != file:
            raise UserError(
                f"{index}: {shown(name)} lies in {shown(file)}: must be the name of a file next to the index"
            )
    return sorted(set(weight_map.values()))


def _other_weights(directory: Path) -> str:
    """The end of a message about a directory whose weights are in another form, which says what to do."""
    shards = sorted(directory.glob("*.safetensors"))
    if shards:
        return f", only {shards[0].name}: download the missing {INDEX}, or call a single file {WEIGHTS}"
    if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
        return (
            ", only pickled weights, which are not read: convert them by transformers' "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )
    return ""


def load(
    actor: torch.nn.Module,
    shape: ModelShape,
    grid: Grid,
    directory: str | Path,
    fused_norms: bool,
    own: Sequence[str] = (),
    keep: bool = False,
) -> dict[str, Tensor]:
    """Fill this rank's stage from a Hugging Face directory, converting to the parameters' dtype.

    fused_norms: whether the actor's norms are in Transformer Engine's linear layers. own: parameters that no directory
    has, which stay as they are. keep: return this rank's part of each tensor in the dtype of the file, by the module's
    own parameter names. Raises UserError if the directory does not have the model of its config.json.
    """
    checkpoint = Checkpoint(Path(directory))
    checkpoint.check(hf_names.hf_shapes(shape))
    if "output_layer.weight" not in own:  # the head of the directory is used
        checkpoint.check_tied(shape)
    parameters = {k: v for k, v in hf_names.global_parameters(actor).items() if k not in own}

    # Each rank reads the entries of its stage and copies its part of them.
    local_names = {id(parameter): name for name, parameter in actor.named_parameters()}
    kept: dict[str, Tensor] = {}
    with torch.no_grad():
        for entry in hf_names.entries(shape, grid.pipeline, fused_norms):
            targets = [parameters.pop(entry.megatron)] if entry.stage == grid.pp_rank else []
            if entry.layout == "vocab" and shape.tied and "output_layer.weight" in parameters:
                targets.append(parameters.pop("output_layer.weight"))  # the last stage's copy of a tied embedding
            if targets:
                part = to_local(entry, checkpoint.read(entry), shape.kv_heads, grid.tp_rank, grid.tensor)
                for target in targets:
                    target.copy_(part)
                    if keep:
                        kept[local_names[id(target)]] = part.to(target.device)

    if parameters:
        raise AssertionError(f"parameters without a Hugging Face name: {sorted(parameters)}")
    return kept


def save(
    tensors: Iterable[tuple[str, Tensor]], source: str | Path, target: str | Path, dtype: str, card: str = ""
) -> None:
    """Write a Hugging Face directory: config.json and tokenizer from `source`, weights from `tensors`, of its shapes.

    Written aside and renamed, so that `target` is either absent, the old one, or complete. dtype is torch's name of
    the tensors' type ("float32"). card: the text of README.md; source's own is never copied. One tensor at a time is in
    memory. Raises ValueError unless `tensors` are exactly those of the model that `source` describes.
    """
    source, target = Path(source), Path(target)
    shapes = hf_names.hf_shapes(read_shape(source))
    with written_aside(target) as aside:
        copy_companions(source, aside)
        complete(source, aside)
        config = read_object(source / CONFIG)
        config.pop("torch_dtype", None)  # the older name of the same key
        config["dtype"] = dtype
        (aside / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if card:
            (aside / CARD).write_text(card, encoding="utf-8")
        layout = {name: (shape, getattr(torch, dtype)) for name, shape in shapes.items()}
        safetensors_files.write(tensors, layout, aside)


def copy_companions(source: Path, target: Path) -> None:
    """config.json, the tokenizer and whatever else stands beside the weights.

    Links out of the directory are left where they are, but for those of a hub's cache, which are made so.
    """
    for path in sorted(source.iterdir()):
        wanted = path.suffix in (".json", ".model", ".txt", ".jinja", ".py") and not path.name.endswith(".index.json")
        if wanted and path.is_file() and _is_within(path, source):
            shutil.copy2(path, target / path.name)


def _is_within(path: Path, directory: Path) -> bool:
    """Whether a file's content lies in the directory, or among the blobs beside a snapshot of the hub's cache."""
    home, found = directory.resolve(), path.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    return found.parent in (home, blobs)


def complete(source: Path, target: Path) -> None:
    """Write to `target`, a copy of `source`, what transformers needs to read it and to stop as the trainer does.

    That is tokenizer.json for a sentencepiece model, and a generation_config.json with all ids that end a response. A
    file of `source` that names them is left as it is. Prints one line on stderr for what cannot be written. Nothing is
    done where there is no tokenizer.
    """
    write_tokenizer_json(source, target)
    if not any((source / name).is_file() for name in TOKENIZERS):
        return
    told = read_object(source / GENERATION) if (source / GENERATION).is_file() else None
    try:
        tokenizer = load_tokenizer(source)
        ids = stop_ids(source, tokenizer)
    except UserError as e:
        print(f"warning: no {GENERATION} written: {e}", file=sys.stderr, flush=True)
        return
    if told is not None and transformers_stop_ids(source) == set(ids):
        return

    told = _other_special_ids(source, tokenizer) if told is None else told
    told["eos_token_id"] = ids[0] if len(ids) == 1 else list(ids)
    (target / GENERATION).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _other_special_ids(source: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what a new generation_config.json says besides EOS.

    transformers would take the ids of config.json from a directory without that file; the new file hides them.
    """
    config = read_object(source / CONFIG) if (source / CONFIG).is_file() else {}
    known = {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
    found = {key: value if config.get(key) is None else config[key] for key, value in known.items()}
    return {key: value for key, value in found.items() if value is not None}


@contextlib.contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A fresh directory beside `target` that takes its place once it is complete; removed where the writing fails.

    OSError names `target` where the call that failed knew no file: writing and syncing have none.
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
    """Put a finished directory in its place; a reader sees the old one, or none for an instant, or the new one."""
    for path in aside.rglob("*"):
        if path.is_file():
            with path.open("rb") as f:
                os.fsync(f.fileno())
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        aside.rename(target)
        shutil.rmtree(old)
    else:
        aside.rename(target)
    parent = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
