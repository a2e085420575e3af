"""Sampling of the next token by inverse CDF, and its log-probability under the distribution it was drawn from."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_brorl.ops import philox


def sampling_log_probs(logits: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Return log-probabilities [B, V] float32 of the sampling distribution; excluded tokens get -inf.

    top_k keeps the k largest logits (0 = all; ties with the k-th stay), then top_p keeps the smallest set of the most
    likely tokens whose mass reaches top_p (Holtzman et al. 2020). The rest is renormalised.
    """
    logits = logits.float()
    if temperature != 1:  # dividing by 1 would only take a pass over memory
        logits = logits / temperature
    if top_k and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(dim=-1).double().cumsum(dim=-1)
        # A token stays while the mass before it is below top_p, so the first one always does.
        cut = torch.cat((torch.zeros_like(mass[..., :1]), mass[..., :-1]), dim=-1) >= top_p
        logits = logits.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), float("-inf"))
    return logits.log_softmax(dim=-1)


def sample(
    logits: Tensor, uniforms: Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0
) -> tuple[Tensor, Tensor]:
    """Draw one token per row of logits [B, V] with the given uniforms [B] in (0, 1).

    Returns ids [B] int64 and their log-probabilities [B] float32. temperature = 0 is greedy: the distribution is a
    point mass, so the log-probability is 0.
    """
    if temperature == 0:
        ids = logits.argmax(dim=-1)
        return ids, torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    log_probs = sampling_log_probs(logits, temperature, top_p, top_k)
    cdf = log_probs.exp().cumsum(dim=-1)
    total = cdf[:, -1:]
    # The target stays below the total, so a token without probability (a flat step of the CDF) is never drawn.
    target = (uniforms.unsqueeze(-1) * total.double()).to(cdf.dtype)
    target = target.minimum(torch.nextafter(total, torch.zeros_like(total)))
    # A row without a distribution gets the last token, whose log-probability is NaN.
    ids = torch.searchsorted(cdf, target, right=True).clamp(max=logits.shape[-1] - 1)
    return ids.squeeze(-1), log_probs.gather(-1, ids).squeeze(-1)


def sample_tokens(
    logits: Tensor, keys: Tensor, index: Tensor, position: Tensor, temperature: float, top_p: float, top_k: int
) -> tuple[Tensor, Tensor]:
    """Call `sample` with the random numbers philox.uniforms(keys, index, position), all [B] int64."""
    return sample(logits, philox.uniforms(keys, index, position), temperature, top_p, top_k)
