"""llama.cpp's server with parallel slots, for bench_rollout.py: pip install xllamacpp gguf safetensors.

Models of the families llama and qwen2 are first written as GGUF in fp32 or bf16. Imports nothing from this project.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from measure import answer, read_job, time_rollouts
from safetensors.numpy import load_file

SLOTS = 256  # llama.cpp's limit of sequences; larger groups are decoded in several calls
KINDS = {"fp32": gguf.GGMLQuantizationType.F32, "bf16": gguf.GGMLQuantizationType.BF16}


def interleave_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return a query or key projection with the rotation's pairs next to each other, as llama.cpp's llama has them."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(model: Path, path: Path, dtype: str) -> None:
    """Write a Hugging Face directory as GGUF, with a vocabulary of made-up tokens, because prompts are token ids."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    family, heads = config["model_type"], config["num_attention_heads"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"<{i}>" for i in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["< 0"])  # llama.cpp requires one
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names: Any = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in load_file(model / "model.safetensors").items():
        tensor = tensor.astype(np.float32)
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            tensor = interleave_halves(tensor, heads if ".q_proj." in name else config["num_key_value_heads"])
        kind = KINDS[dtype] if tensor.ndim == 2 else KINDS["fp32"]
        gguf_name = names.get_name(name, (".weight", ".bias"))
        writer.add_tensor(gguf_name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    job = read_job()
    max_tokens = max(map(len, job["prompts"])) + max(job["lengths"])
    path = Path(job["scratch"]) / f"model-{job['dtype']}.gguf"
    if not path.exists():
        write_gguf(Path(job["model"]), path, job["dtype"])
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel = min(SLOTS, len(job["lengths"]))
    # The margin of 32 tokens keeps a sequence below the limit of its slot, which would end the response.
    params.n_ctx = params.n_parallel * (max_tokens + 32)
    params.n_batch = params.n_ubatch = 2048
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    params.cache_ram_mib = 0
    params.verbosity = 0
    server = xllamacpp.Server(params)

    def generate(prompt: list[int], lengths: list[int], seed: int) -> list[list[int]]:
        if len(set(lengths)) > 1:
            raise ValueError("llama.cpp: all responses of a benchmark need the same length")
        rows: list[list[int]] = []
        while len(rows) < len(lengths):
            request: dict[str, Any] = {
                "prompt": prompt,
                "n": min(params.n_parallel, len(lengths) - len(rows)),
                "max_tokens": lengths[0],
                "ignore_eos": True,
                "temperature": 1.0,
                "top_k": 0,
                "top_p": 1.0,
                "min_p": 0.0,
                "samplers": ["temperature"],
                "seed": 1000 * seed + len(rows),
                "cache_prompt": False,
            }
            choices = server.handle_completions(request)["choices"]
            # The text of token i is "<i>".
            rows += [[int(token) for token in re.findall(r"<(\d+)>", choice["text"])] for choice in choices]
        return rows

    answer(**time_rollouts(job, generate), version=f"llama.cpp of xllamacpp {xllamacpp.__version__}")


if __name__ == "__main__":
    main()
