"""Which precision ops compute in."""

from __future__ import annotations

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of everything that is not a matrix: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
