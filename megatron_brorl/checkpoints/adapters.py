"""LoRA adapters as files: PEFT directories, and checkpoints of runs, which hold adapters without their base model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_brorl.checkpoints import folders, hugging_face
from megatron_brorl.checkpoints.megatron_format import MegatronCheckpoint
from megatron_brorl.config.schema import LoraConfig
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import ModelShape
from megatron_brorl.models.weights.layouts import WeightEntry
from megatron_brorl.models.weights.names import adapter_entries

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
BASE_WEIGHTS = "base_weights"  # key in fingerprint["inputs"] of the SHA-256 of the base model's weight files


def write_peft(tensors: Iterable[tuple[str, Tensor]], lora: LoraConfig, base: str, directory: Path) -> None:
    """Write the files of a directory that peft.PeftModel.from_pretrained loads.

    tensors: by PEFT's names; kept in memory until they are written. base: directory or name of the base model.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "inference_mode": True,
    }
    (directory / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # The tensors of a weight stream are views of a bucket, and safetensors does not write views.
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors}
    save_file(copies, directory / PEFT_WEIGHTS, metadata={"format": "pt"})


def saved_lora(directory: Path) -> LoraConfig | None:
    """Return the [lora] section of a run's checkpoint, or None if the checkpoint has no adapters."""
    if not (directory / folders.RUN).is_file():
        return None
    section = folders.read_run(directory).get("fingerprint", {}).get("lora", {"rank": 0})
    return LoraConfig(**{**section, "targets": tuple(section["targets"])}) if section["rank"] else None


class MergedCheckpoint:
    """The adapters of a run's checkpoint, and the base model's weights with these adapters merged."""

    def __init__(self, directory: Path, shape: ModelShape, lora: LoraConfig, base: hugging_face.Checkpoint) -> None:
        """Raise UserError if the checkpoint is damaged, or if it was trained on other weights than those of `base`."""
        saved = folders.read_run(directory)["fingerprint"]["inputs"][BASE_WEIGHTS]
        sha256 = hugging_face.weights_sha256(base.directory)
        if sha256 != saved:
            raise UserError(
                f"{base.directory}: is not the base model of {directory} (sha256 {sha256[:12]}, not {saved[:12]}): "
                "give the directory that model.path named in that run"
            )
        self.lora = lora
        self.entries = adapter_entries(shape, 1, lora)
        self.adapters = MegatronCheckpoint(directory, shape, self.entries)
        self.base = base
        self._dtype = self.adapters.dtype(self.entries[0])
        self._entry_of = {name: entry for entry in self.entries for name in entry.hf}

    def dtype(self, _entry: WeightEntry) -> torch.dtype:
        """Return the type in which the run computed: all tensors have it."""
        return self._dtype

    def read(self, entry: WeightEntry) -> list[Tensor]:
        """Return the merged tensors of an entry of the base model."""
        return [self._merge(name, x.to(self._dtype)) for name, x in zip(entry.hf, self.base.read(entry), strict=True)]

    def _merge(self, name: str, weight: Tensor) -> Tensor:
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" not in self._entry_of:
            return weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        factor_entries = (self._entry_of[f"{layer}.lora_{factor}.weight"] for factor in "AB")
        a, b = (self.adapters.read(entry)[0].to(wide) for entry in factor_entries)
        return (weight.to(wide) + self.lora.alpha / self.lora.rank * b @ a).to(weight.dtype)
