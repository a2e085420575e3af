"""Convert a GGUF file of a Llama model with SmolLM's tokenizer to a Hugging Face directory in fp32.

python tools/convert_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf runs/smollm2-135m
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from megatron_brorl.checkpoints import safetensors_files
from megatron_brorl.checkpoints.hugging_face import add_generation_files
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import CONFIG, parse_shape
from megatron_brorl.models.weights.names import hf_shapes

# Keys of config.json, and the GGUF keys with the same meaning.
SIZES = {
    "vocab_size": "llama.vocab_size",
    "max_position_embeddings": "llama.context_length",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.rope.dimension_count",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "rope_theta": "llama.rope.freq_base",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
}
# Other architectures and tokenizers need other names, rotations or pre-tokenizers.
SUPPORTED = {
    "general.architecture": "llama",
    "llama.rope.scaling.type": None,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
}


class _Reader(gguf.GGUFReader):
    """GGUFReader on a plain array. It takes 250,000 slices, and a slice of a memmap costs ten times as much."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)


class GgufFile:
    """Metadata and dequantized tensors of a GGUF file."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._reader = _Reader(path)
        except (OSError, ValueError) as e:
            raise UserError(f"{path}: cannot be read as GGUF: {e}") from None
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def find(self, key: str) -> Any:
        """Return the value of a key, or None if the file does not have it."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def get(self, key: str) -> Any:
        """Return the value of a key that must be present."""
        value = self.find(key)
        if value is None:
            raise UserError(f"{self.path}: the key {key} is missing")
        return value

    def weight(self, name: str) -> Tensor:
        """Return a tensor in fp32."""
        tensor = self.tensors[name]
        return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))


def convert(path: Path, directory: Path) -> str:
    """Write the Hugging Face directory and return a line about it. Raises UserError for an unsupported model."""
    file = GgufFile(path)
    for key, supported in SUPPORTED.items():
        if (value := file.find(key)) != supported:
            raise UserError(f"{path}: {key} is {value!r}; supported: {supported!r}")
    config = _config(file)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    licence = file.find("general.license") or "other"
    (directory / "README.md").write_text(f"---\nlicense: {licence}\n---\n", encoding="utf-8")
    _write_tokenizer(file, directory)
    _write_weights(file, config, directory)
    add_generation_files(source=directory, target=directory)
    return f"{directory}: Llama with {config['num_hidden_layers']} layers in fp32, converted from {path.name}"


def _config(file: GgufFile) -> dict[str, Any]:
    """Return the content of config.json."""
    # Chat models end a turn (eot), or a message with a tool call (eom), with tokens of their own.
    end_ids = [file.get(SIZES["eos_token_id"])]
    chat_ids = (file.find(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))
    end_ids += [token for token in chat_ids if token is not None and token not in end_ids]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "dtype": "float32",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **{name: file.get(key) for name, key in SIZES.items()},
        **({"eos_token_id": end_ids} if len(end_ids) > 1 else {}),
    }


def _write_weights(file: GgufFile, config: dict[str, Any], directory: Path) -> None:
    """Write the tensors under their names in Hugging Face checkpoints."""
    sizes = hf_shapes(parse_shape(config, str(file.path)))
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    names = {name: f"{table.get_name(name.removesuffix('.weight'))}.weight" for name in sizes}
    if different := set(names.values()) ^ set(file.tensors):
        raise UserError(f"{file.path}: not the tensors of a Llama model: {min(different)} is missing or unknown")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def weight(name: str) -> Tensor:
        tensor = file.weight(names[name])
        projection = name.split(".")[-2]
        return _split_halves(tensor, heads[projection]) if projection in heads else tensor

    layout = {name: (size, torch.float32) for name, size in sizes.items()}
    safetensors_files.write(((name, weight(name)) for name in sizes), layout, directory)


def _split_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head for Hugging Face's rotation.

    llama.cpp rotates rows 2i and 2i + 1 of a head as a pair, Hugging Face rows i and i + head_dim / 2.
    """
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _write_tokenizer(file: GgufFile, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokens = file.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges")]
    bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, file.get("tokenizer.ggml.token_type"), strict=True))
    tokenizer.add_special_tokens([token for token, kind in kinds if kind == gguf.TokenType.CONTROL])
    # Text is never split within these tokens, such as <think>, but they are not special.
    user_tokens = [token for token, kind in kinds if kind == gguf.TokenType.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in user_tokens])
    bos = tokens[file.get(SIZES["bos_token_id"])]
    if file.find("tokenizer.ggml.add_bos_token"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B:1"], special_tokens=[(bos, tokens.index(bos))]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=tokens[file.get(SIZES["eos_token_id"])],
        chat_template=file.find("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    ).save_pretrained(str(directory))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="file to convert, in any quantization that the gguf package reads")
    parser.add_argument("directory", type=Path, help="Hugging Face directory to write")
    options = parser.parse_args()
    print(convert(options.gguf, options.directory))


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as e:
        print(f"convert_gguf: {e}", file=sys.stderr)
        sys.exit(2)
