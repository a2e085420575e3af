"""Test tools/convert_gguf.py on files that are written from a transformers model as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from convert_gguf import convert
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatron_brorl.data.tokenizers import load_tokenizer, stop_ids
from megatron_brorl.errors import UserError

HEADS = {"attn_q": 4, "attn_k": 2}  # heads of the matrices whose rows are permuted
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEXT = "In 1999 the 12 3-digit numbers <|im_end|> said: naïve ½!\n\tIt's 52 + 7 = 59 "
Q8 = gguf.GGMLQuantizationType.Q8_0


def make_tokenizer(size: int = 288) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=special)
    tokenizer.train_from_iterator([TEXT] * 9, trainer)
    return tokenizer


def make_model(tied: bool) -> LlamaForCausalLM:
    """Return a random model whose feed-forward weights are multiples of 1/64, which Q8_0 stores exactly."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 288}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-3, "rope_theta": 500.0}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **attention, tie_word_embeddings=tied)).eval()
    for name, weight in model.named_parameters():
        weight.data = torch.randn(weight.shape) * 0.3 + ("norm" in name)
        if "mlp" in name:
            blocks = torch.randint(-127, 128, (weight.numel() // 32, 32))
            blocks[:, 0] = 127  # The scale of a block is its largest value / 127.
            weight.data = (blocks / 64).view(weight.shape)
    return model


def write(path: Path, source: LlamaForCausalLM, tokenizer: Tokenizer, arch="llama", added=(), **settings) -> Path:
    """Write a GGUF file. added: user-defined tokens, which come last. settings: values by method of the writer."""
    writer = gguf.GGUFWriter(path, arch)
    sizes = {"vocab_size": 288, "context_length": 64, "embedding_length": 32, "block_count": 2}
    sizes |= {"feed_forward_length": 64, "head_count": 4, "head_count_kv": 2, "rope_dimension_count": 8}
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_layer_norm_rms_eps(1e-3)
    writer.add_rope_freq_base(500.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*(tokenizer.id_to_token(i) for i in range(288 - len(added))), *added])
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (285 - len(added))
    writer.add_token_types(kinds + [gguf.TokenType.USER_DEFINED] * len(added))
    for method, value in settings.items():
        getattr(writer, method)(value)
    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in source.named_parameters():
        for hf_part, gguf_part in NAMES.items():
            name = name.replace(hf_part, gguf_part)
        if heads := HEADS.get(name.split(".")[-2]):  # llama.cpp's convert_hf_to_gguf.py permutes these rows.
            weight = weight.reshape(heads, 2, 4, 32).swapaxes(1, 2).reshape(weight.shape)  # 2 halves of 4 rows
        data = weight.detach().numpy().copy()
        if "ffn" in name and "norm" not in name:
            writer.add_tensor(name, gguf.quantize(data, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weights_and_tokens_are_those_of_the_source(tmp_path, tied):
    source, tokenizer = make_model(tied), make_tokenizer()
    convert(write(tmp_path / "in.gguf", source, tokenizer), tmp_path / "out")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = torch.tensor([tokenizer.encode(TEXT).ids])
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, source(ids).logits)
    assert hf_tokenizer(TEXT).input_ids == ids[0].tolist()
    assert hf_tokenizer.decode(ids[0]) == TEXT
    assert (hf_tokenizer.bos_token_id, hf_tokenizer.eos_token) == (1, "<|im_end|>")


EOT, EOM, BOS = "add_eot_token_id", "add_eom_token_id", "add_add_bos_token"


@pytest.mark.parametrize(
    ("settings", "stops"), [({}, [2]), ({EOT: 2, BOS: False}, [2]), ({EOT: 0, BOS: True}, [0, 2]), ({EOM: 1}, [1, 2])]
)
def test_user_defined_tokens_bos_and_the_ends_of_turns_are_kept(tmp_path, settings, stops):
    """The added tokens follow the vocabulary of tokenizers, which treats the text around them as before."""
    source, tokenizer = make_model(tied=True), make_tokenizer(size=285)
    file = write(tmp_path / "in.gguf", source, tokenizer, added=("<think>", "</think>", "  <x>"), **settings)
    convert(file, tmp_path / "out")
    hf_tokenizer, brorl_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out"), load_tokenizer(tmp_path / "out")
    # Letters and digits are single tokens here, because the vocabulary has few merges.
    text = "<think>a1</think>b  <x><|im_end|>"
    a, one, b = map(tokenizer.token_to_id, "a1b")
    ids = [285, a, one, 286, b, 287, 2]
    bos = [1] if settings.get(BOS) else []
    assert hf_tokenizer(text).input_ids == bos + ids
    assert hf_tokenizer.decode(ids) == text
    assert hf_tokenizer.decode(ids, skip_special_tokens=True) == text.removesuffix("<|im_end|>")
    assert brorl_tokenizer.encode_prompt("a") == [*bos, a]
    assert brorl_tokenizer.encode("<think>") == [285]
    assert list(stop_ids(tmp_path / "out", brorl_tokenizer)) == stops
    eos = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id
    assert sorted([eos] if isinstance(eos, int) else eos) == stops


def test_unsupported_models_are_refused(tmp_path):
    source, tokenizer = make_model(tied=True), make_tokenizer()
    with pytest.raises(UserError, match=r"general\.architecture is 'qwen2'"):
        convert(write(tmp_path / "qwen2.gguf", source, tokenizer, arch="qwen2"), tmp_path / "out")
    del source.model.layers[1].mlp.up_proj
    with pytest.raises(UserError, match=r"blk\.1\.ffn_up\.weight is missing"):
        convert(write(tmp_path / "part.gguf", source, tokenizer), tmp_path / "out")
