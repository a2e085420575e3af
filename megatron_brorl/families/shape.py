"""The shape of a model, read from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_brorl.errors import UserError, shown
from megatron_brorl.families import dense, gemma3, moe
from megatron_brorl.families.family import ConfigJson, Dimension, ModelFamily, Requirement
from megatron_brorl.files import read_object

CONFIG = "config.json"
WEIGHTS = "model.safetensors"  # the one file of a checkpoint that is not sharded
FAMILIES = {
    f.architecture: f for f in (dense.LLAMA, dense.QWEN2, dense.QWEN3, gemma3.FAMILY, moe.QWEN2_MOE, moe.QWEN3_MOE)
}
# Keys that would change the computation or the place of the weights in any family.
_OF_EVERY_FAMILY = (
    Requirement("text_config", (None, {}), "give the directory of the text model alone"),
    Requirement("per_layer_config", (None, {}), "all layers must be alike"),
    Requirement("transformers_weights", (None,), "the weights must be model.safetensors or its shards"),
)
_BY_NAME = {f.name: f for f in FAMILIES.values()}


@dataclass(frozen=True)
class ModelShape:
    """Sizes and architecture of a model, as the Megatron actor and the built-in engine need them."""

    family: str  # name of its ModelFamily
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of an expert if there are experts
    vocab: int
    context: int  # max_position_embeddings
    norm_eps: float
    tied: bool  # the LM head is the embedding
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None  # the rope_scaling object, with "rope_type"
    init_std: float
    # Fields of few families. None means as in Llama.
    activation: str | None = None  # of the MLP's gate: "gelu_tanh"; None: silu
    embedding_scale: float | None = None  # None: 1
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    local_layers: tuple[int, ...] | None = None  # layers with a rotation of their own
    local_rope_theta: float | None = None  # base of that rotation, which is never scaled
    experts: int = 0  # number in each layer; 0: a dense MLP
    chosen_experts: int = 0  # experts that compute a token
    norm_topk_prob: bool = False  # whether the weights of a token's experts are divided by their sum
    shared_ffn: int = 0  # intermediate size of the expert that computes every token; 0: none

    @property
    def model_family(self) -> ModelFamily:
        """Return the family's table."""
        return _BY_NAME[self.family]

    @property
    def qkv_bias(self) -> bool:
        """Return whether queries, keys and values have a bias."""
        return self.model_family.find(dense.QKV_BIAS) is not None

    @property
    def qk_norm(self) -> bool:
        """Return whether query and key heads are normed."""
        return self.model_family.find(dense.Q_NORM) is not None

    @property
    def zero_centred_norms(self) -> bool:
        """Return whether norms scale by 1 + weight; such weights are initialised with zeros."""
        return self.model_family.final_norm.init == "zeros"

    @property
    def post_norms(self) -> bool:
        """Return whether the outputs of attention and MLP are normed before they are added to the residual stream."""
        return self.model_family.find(gemma3.POST_ATTENTION_NORM) is not None

    @property
    def is_llama_like(self) -> bool:
        """Return whether the layers are Llama's, apart from biases, head norms and experts, as fused layers require."""
        differences = self.activation, self.embedding_scale, self.attention_scale, self.local_layers
        return differences == (None,) * 4 and not self.zero_centred_norms and not self.post_norms

    @property
    def of_local_layers(self) -> ModelShape:
        """Return the shape with the rotation of the local layers."""
        assert self.local_rope_theta is not None
        return replace(self, rope_theta=self.local_rope_theta, rope_scaling=None)

    @property
    def dimensions(self) -> Mapping[Dimension, int]:
        """Return the sizes that the family's parameters refer to."""
        return {
            "one": 1,
            "vocab": self.vocab,
            "hidden": self.hidden,
            "q": self.heads * self.head_dim,
            "kv": self.kv_heads * self.head_dim,
            "head": self.head_dim,
            "ffn": self.ffn,
            "experts": self.experts,
            "shared_ffn": self.shared_ffn,
        }


def read_shape(directory: str | Path, key: str = "model.path") -> ModelShape:
    """Read `directory`/config.json. Raises UserError if it is missing or describes an unsupported model.

    key: the configuration key or the argument that names the directory.
    """
    directory = Path(directory).absolute()
    refuse_gguf(directory)
    _refuse_adapter(directory, key)
    path = directory / CONFIG
    if directory.is_file():
        raise UserError(f"{directory}: is a file; give the Hugging Face directory that it belongs to ({key})")
    if not directory.is_dir():
        raise UserError(f"{directory}: no such Hugging Face directory ({key})")
    if not path.is_file():
        raise UserError(f"{path}: missing; a Hugging Face directory holds config.json, *.safetensors and a tokenizer")
    return parse_shape(read_object(path), str(path))


def _refuse_adapter(directory: Path, key: str) -> None:
    """Raise UserError if a directory has a PEFT adapter and no weights of a model."""
    adapter = directory / "adapter_config.json"
    if adapter.is_file() and not any(file.name.startswith("model") for file in directory.glob("*.safetensors*")):
        raise UserError(
            f"{directory}: is a PEFT adapter of {shown(read_object(adapter).get('base_model_name_or_path'))}, not a "
            "model: write a merged model by peft's AutoPeftModelForCausalLM.from_pretrained(DIR).merge_and_unload()"
            f".save_pretrained(NEW_DIR), copy the base model's tokenizer files there, and give NEW_DIR ({key})"
        )


def refuse_gguf(path: Path) -> None:
    """Raise UserError if `path` is a GGUF file, or a directory whose only weights are GGUF files."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    gguf = [file for file in files if file.suffix.lower() == ".gguf"]
    if gguf and not any(file.suffix == ".safetensors" for file in files):
        raise UserError(
            f"{gguf[0]}: weights in the GGUF format are not read; first convert them to a Hugging Face directory: "
            f"transformers' AutoModelForCausalLM and AutoTokenizer.from_pretrained(DIR, gguf_file={gguf[0].name!r}) "
            "and save_pretrained(NEW_DIR) of both"
        )


def parse_shape(raw: Mapping[str, Any], where: str) -> ModelShape:
    """Turn the content of a config.json into a ModelShape. Raises UserError naming the key that does not fit."""
    # Several architectures may be listed; the first one is the model's.
    config = ConfigJson(raw, where)
    architecture = (config.get("architectures", list, []) or [None])[0]
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise UserError(
            f"{where}: architecture {shown(architecture)} is not supported; supported: {', '.join(FAMILIES)}"
        )

    # Missing keys get the defaults of the family in transformers. A null key is not missing: Qwen's configurations have
    # 32 key-value heads by default, but as many as query heads if the key is null.
    family = FAMILIES[architecture]
    config = ConfigJson({**family.defaults, **raw}, where)

    # Refuse unsupported models before any size is read.
    model_type = Requirement("model_type", (family.model_type, None), f"architectures says {architecture}")
    for requirement in (model_type, *_OF_EVERY_FAMILY, *family.requires):
        config.require(requirement)

    # A key that is read without a default must be present.
    hidden, heads = config.get("hidden_size", int), config.get("num_attention_heads", int)
    fields: dict[str, Any] = {
        "family": family.name,
        "layers": config.get("num_hidden_layers", int, most=10_000),  # the table of parameters lists every layer
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", int, heads),  # null: no grouping of queries
        "head_dim": config.get("head_dim", int, hidden // heads, most=65_536),
        "ffn": config.get("intermediate_size", int),
        "vocab": config.get("vocab_size", int),
        "context": config.get("max_position_embeddings", int),
        "norm_eps": config.get("rms_norm_eps", float, 1e-6),
        "tied": config.get("tie_word_embeddings", bool, False),
        "init_std": config.get("initializer_range", float, 0.02),
    }
    # Fields that the family reads differently override these.
    shape = ModelShape(**{**fields, **family.rest(config)})

    # Every attention implementation here needs query groups of equal size.
    if shape.heads % shape.kv_heads:
        raise UserError(
            f"{where}: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {shape.kv_heads}"
        )
    return shape
