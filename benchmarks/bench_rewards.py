#!/usr/bin/env python3
"""Scoring of a whole step, with equal answers of a prompt scored once and with each scored separately.

    python benchmarks/bench_rewards.py [--verifier NAME] [--workers N] [--quick] [--json FILE] [--repeat N]

There are 128 prompts with 512 responses of about 1,000 characters. The share of right responses grows evenly over the
first two thirds of the prompts from none to all; the last third is all right. Of 64 wrong answers the k-th is drawn
with a weight of 1 / k. All responses differ; one in sixteen has no answer. A third of the references are whole
numbers, a third decimals or fractions, a third expressions. The responses for verifier `exact` are only the answers.

Seconds are the best of --repeat, from the first rollout to the last reward as in a step, without a tokenizer. Workers
import the verifier before the measurement. The two ways run in one process and must agree in every reward.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import torch
from bench_common import options, write_rows

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.rewards.scoring import Scorer
from megatron_brorl.rewards.worker_pool import PoolStats, RewardPool
from megatron_brorl.types import Prompt, Rollout

PROMPTS = 128
SIBLINGS = 512
WRONG = 64  # wrong answers of a prompt
NO_ANSWER = 1 / 16  # share of the responses without an answer
WORDS = "so we add the two numbers and then find that this part is half left".split()  # noqa: SIM905
CHARS = 1000  # characters of the text before an answer


def references(rng: random.Random, count: int) -> list[str]:
    """Return reference answers of three kinds, in turn."""
    answers = []
    for i in range(count):
        a = rng.randrange(2, 1000)
        b = rng.randrange(2, 100)
        answers.append([str(a), rng.choice([f"{a}/{b}", f"{a}.{b}"]), rf"\frac{{{a}\sqrt{{{b}}}}}{{7}}"][i % 3])
    return answers


def wrong_answers(reference: str) -> list[str]:
    """Return WRONG answers: the reference with its first number increased by 1, 2 and so on."""
    start = next(i for i, c in enumerate(reference) if c.isdigit())
    end = next((i for i in range(start, len(reference)) if not reference[i].isdigit()), len(reference))
    return [f"{reference[:start]}{int(reference[start:end]) + by}{reference[end:]}" for by in range(1, WRONG + 1)]


def responses(rng: random.Random, verifier: str, reference: str, n: int, right: float) -> list[str]:
    """Return texts of which a share of about `right` has the reference as the answer."""
    wrong = wrong_answers(reference)
    answers = rng.choices(wrong, [1 / k for k in range(1, len(wrong) + 1)], k=n)
    answers = [reference if rng.random() < right else answer for answer in answers]
    if verifier == "exact":
        return answers  # `exact` compares the whole response

    # Reasoning that differs between responses, then the answer.
    texts = []
    for answer in answers:
        words = " ".join(rng.choices(WORDS, k=CHARS // 3))[:CHARS]  # a word has 3 or more characters with its space
        end = "" if rng.random() < NO_ANSWER else f"\\boxed{{{answer}}}"
        if end and answer.isdigit() and rng.random() < 0.5:
            end = f"\n#### {answer}"
        texts.append(f"{words} {end}")
    return texts


def measure(prompts: list[Prompt], texts: list[list[str]], pool: RewardPool) -> tuple[float, list[float], PoolStats]:
    """Return the seconds and the rewards of one scoring, and the counts of the pool."""
    n = len(texts[0])
    flat = [text for siblings in texts for text in siblings]
    # Each response has one token, its index in `flat`, which the decoder below replaces by the text.
    rollouts = [
        Rollout(index=i % n, token_ids=torch.tensor([i]), log_probs=torch.zeros(1), finish="stop")
        for i in range(len(flat))
    ]
    pool.reset()
    start = time.perf_counter()
    with Scorer(prompts, lambda ids: flat[ids[0]], (), pool, RewardConfig()) as scorer:
        for i, rollout in enumerate(rollouts):
            scorer.finished(i // n, rollout)
        scores = scorer.scores([divmod(i, n) for i in range(len(flat))])
    return time.perf_counter() - start, scores.rewards.tolist(), replace(pool.stats)


def main() -> None:
    parser = options(
        __doc__, quick="8 prompts of 64 responses", repeat=1, repeats="scorings per row, of which the best counts"
    )
    parser.add_argument("--verifier", default="math", help="of the prompts, by its name (default math)")
    parser.add_argument("--workers", type=int, default=2, help="scoring processes (default 2)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    rng = random.Random(0)
    count, n = (8, 64) if args.quick else (PROMPTS, SIBLINGS)
    prompts = [
        Prompt(id=f"p/{i}", text="", token_ids=(1,), answer=answer, verifier=args.verifier)
        for i, answer in enumerate(references(rng, count))
    ]
    # The share of right responses grows from 0 to 1 over two thirds of the prompts, in a random order of prompts.
    shares = [min(1.0, 1.5 * (i + 0.5) / count) for i in rng.sample(range(count), count)]
    texts = [responses(rng, args.verifier, str(p.answer), n, share) for p, share in zip(prompts, shares, strict=True)]

    print("cache    verdicts    judged   hits   seconds  verdicts/s  max latency")
    rows: list[dict[str, Any]] = []
    rewards: list[list[float]] = []
    for cache in (True, False):
        impure: frozenset[str] = frozenset() if cache else frozenset({args.verifier})  # not cached
        with RewardPool(args.workers, timeout_s=20.0, impure=impure) as pool:
            # Imports are not part of a step, so every worker scores something first.
            measure(prompts[:4], [siblings[:16] for siblings in texts[:4]], pool)
            runs = [measure(prompts, texts, pool) for _ in range(args.repeat)]
        seconds, scores, stats = min(runs, key=lambda run: run[0])
        rewards.append(scores)
        row = {
            "verifier": args.verifier,
            "workers": args.workers,
            "cache": cache,
            "verdicts": count * n,
            "judged": stats.answers - stats.hits,
            "hit_share": stats.hits / stats.answers,
            "seconds": seconds,
            "verdicts_per_s": count * n / seconds,
            "latency_max_s": stats.latency_max_s,
        }
        rows.append(row)
        print(
            f"{'yes' if cache else 'no':<5}{row['verdicts']:>12}{row['judged']:>10}{row['hit_share']:>7.1%}"
            f"{seconds:>10.2f}{row['verdicts_per_s']:>12.0f}{stats.latency_max_s:>12.1f} s"
        )
    if rewards[0] != rewards[1]:
        raise SystemExit("the rewards differ")
    print(f"{len(set(rewards[0]))} rewards, mean {sum(rewards[0]) / len(rewards[0]):.3f}")
    write_rows(args.json, rows)


if __name__ == "__main__":
    main()
