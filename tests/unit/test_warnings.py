"""Check that importing the package and Megatron-Core prints no warning."""

from __future__ import annotations

import os
import subprocess
import sys

# The order of imports of a run from Python. The second module reads checkpoints.
IMPORTS = """
import megatron_brorl, warnings
import megatron_brorl.api.training, megatron_brorl.checkpoints.training
from megatron.core.transformer.transformer_config import TransformerConfig
TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
print("imported")
"""
# Warnings that a user can act on, of the modules and categories whose other warnings are filtered.
OTHERS = """
for category, text in ((UserWarning, "the device is out of memory"), (FutureWarning, "`other` is deprecated")):
    warnings.warn_explicit(text, category, "optimizer.py", 1, module="megatron.core.optimizer")
    warnings.warn_explicit(text, category, "serialization.py", 1, module="torch.serialization")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"} | {"TORCHDYNAMO_DISABLE": "1"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


def test_importing_is_silent_and_other_warnings_are_shown():
    process = run(IMPORTS + OTHERS)
    assert process.stdout == "imported\n", process.stderr
    assert process.stderr.count("Warning") == 4, process.stderr
    assert process.stderr.count("the device is out of memory") == 2
    assert process.stderr.count("`other` is deprecated") == 2
