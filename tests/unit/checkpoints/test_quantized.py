"""Tests of `brorl quantize` on a tiny model: metrics against plain formulas, and files against the original."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import error_line, output
from safetensors.torch import load_file

from megatron_brorl.checkpoints import quantized

ROOT = Path(__file__).parents[3]
needs_modelopt = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None,
    reason="nvidia-modelopt is not installed (pip install nvidia-modelopt==0.47.0 requests)",
)
CONFIG = '[[data.tasks]]\nname = "spell_backward"\nconfig = { min_word_len = 3, max_word_len = 6 }\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("quantize")
    (root / "run.toml").write_text(CONFIG)
    tool = [sys.executable, str(ROOT / "tools" / "make_tiny_model.py"), str(root / "run.toml"), str(root / "model")]
    subprocess.run([*tool, "--untied", "--texts", "200"], check=True, capture_output=True, timeout=900)
    words = ["alpha", "bridge", "cinnamon", "delta", "emerald", "forest", "granite", "harbour"]
    rows = [
        {"prompt": f"Spell {w} backward, then {v}", "answer": "x", "verifier": "exact"} for w in words for v in words
    ]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root / "model", root / "prompts.jsonl"


def test_user_errors_name_the_argument(tmp_path, capsys, monkeypatch):
    """The model does not exist, so arguments are checked before it is read."""
    arguments = ("quantize", "evaluate", tmp_path / "model", tmp_path / "rows.jsonl")
    assert "--calibrate 0: must be at least 1" in error_line(capsys, *arguments, "--calibrate", 0)
    assert f"{tmp_path}: exists" in error_line(capsys, "quantize", "export", *arguments[2:], tmp_path)
    monkeypatch.setitem(sys.modules, "modelopt", None)  # its import fails
    assert "pip install 'megatron-brorl[quantize]'" in error_line(capsys, *arguments)


def test_shift_equals_plain_loops():
    rng = torch.Generator().manual_seed(0)
    logits = [[torch.randn(n, 7, generator=rng) for n in (3, 5)] for _ in range(2)]
    targets = [torch.randint(0, 7, (n,), generator=rng) for n in (3, 5)]
    kl, gap, agree = [], [], []
    for before, after, ids in zip(*logits, targets, strict=True):
        for logits_before, logits_after, token in zip(before.tolist(), after.tolist(), ids.tolist(), strict=True):
            p = [math.exp(v) / sum(map(math.exp, logits_before)) for v in logits_before]
            q = [math.exp(v) / sum(map(math.exp, logits_after)) for v in logits_after]
            kl.append(sum(i * math.log(i / j) for i, j in zip(p, q, strict=True)))
            gap.append(abs(math.log(p[token] / q[token])))
            agree.append(p.index(max(p)) == q.index(max(q)))
    shift = quantized.distribution_shift(*logits, targets)
    assert shift.tokens == len(kl) == 3 + 5
    assert shift.kl_mean == pytest.approx(sum(kl) / len(kl))
    assert shift.kl_max == pytest.approx(max(kl))
    assert shift.gap_mean == pytest.approx(sum(gap) / len(gap))
    assert shift.top_agrees == sum(agree) / len(agree)


@needs_modelopt
def test_fp8_changes_the_distribution_less_than_int4(model, capsys):
    shifts = {}
    for form in ("fp8", "int4"):
        text = output(capsys, "quantize", "evaluate", *model, "--format", form, "--calibrate", 16)
        shifts[form] = json.loads(text.strip().splitlines()[-1])
    assert shifts["fp8"]["tokens"] == shifts["int4"]["tokens"] > 500
    assert 0 < shifts["fp8"]["kl_mean"] < shifts["int4"]["kl_mean"] < 0.1
    assert shifts["fp8"]["top_agrees"] > 0.8


@needs_modelopt
def test_exported_weights_equal_the_original_within_rounding(model, tmp_path, capsys):
    """float8 weights times scale are within half a step, 1/16 of them or 1/15 of the originals. The rest is bf16."""
    out = tmp_path / "out"
    output(capsys, "quantize", "export", *model, out)
    original = load_file(model[0] / "model.safetensors")
    exported = load_file(out / "model.safetensors")
    assert exported.keys() >= original.keys()
    linears = [n for n in original if n.endswith("_proj.weight")]
    assert linears
    for name in original:
        if name not in linears:
            assert torch.allclose(exported[name].float(), original[name], rtol=2**-8, atol=0)
            continue
        weight = exported[name]
        scale = exported[name.replace("weight", "weight_scale")]
        assert weight.dtype == torch.float8_e4m3fn
        assert float(scale) == pytest.approx(float(original[name].abs().max()) / 448, rel=1e-2)  # 448: largest float8
        error = (weight.float() * scale - original[name]).abs()
        assert bool((error <= original[name].abs() / 15 + scale * 2**-9).all())  # 2**-9: smallest float8
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "modelopt"
    assert (out / "tokenizer.model").read_bytes() == (model[0] / "tokenizer.model").read_bytes()
