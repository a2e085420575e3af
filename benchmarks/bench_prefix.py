#!/usr/bin/env python3
"""What an instruction costs that all prompts begin with: the same one for all of them, against one of its own for each.

    python benchmarks/bench_prefix.py [--quick] [--json FILE] [--model t4] [--n 16] [--prompts 32] [--instruction 450]
                                 [--own 10] [--tokens 8] [--threads N] [--repeat N]

Both rows ask the built-in engine in one call for N siblings of each prompt, as long and with as many response tokens.
computed: prompt tokens that went through the model. The median of the calls counts, after one that warms up.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from bench_common import MODELS, options, write_model, write_rows
from safetensors.torch import load_file

from megatron_brorl.model_shape import WEIGHTS, read_shape
from megatron_brorl.models.hf_names import hf_shapes
from megatron_brorl.ops.backend import backend
from megatron_brorl.ops.fused.sampling import sample_tokens
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native.engine import TorchEngine
from megatron_brorl.types import Prompt


def requests(shared: bool, call: int, prompts: int, instruction: int, own: int, n: int, vocab: int) -> list[Request]:
    """Of one call, with prompts that no other call has."""
    draw = random.Random(call)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(2, vocab) for _ in range(count))

    same = tokens(instruction)
    ids = [(same if shared else tokens(instruction)) + tokens(own) for _ in range(prompts)]
    return [Request(Prompt(str(i), "", x, None, "exact"), i, n) for i, x in enumerate(ids)]


def main() -> None:
    parser = options(__doc__, "4 prompts of 4 siblings", 5, "timed calls per row")
    parser.add_argument("--model", choices=MODELS, default="t4")
    parser.add_argument("--n", type=int, default=16, help="siblings (%(default)s)")
    parser.add_argument("--prompts", type=int, default=32, help="of a call (%(default)s)")
    parser.add_argument("--instruction", type=int, default=450, help="tokens of it (%(default)s)")
    parser.add_argument("--own", type=int, default=10, help="tokens of each prompt behind it (%(default)s)")
    parser.add_argument("--tokens", type=int, default=8, help="of each response (%(default)s)")
    args = parser.parse_args()
    if args.quick:
        args.n, args.prompts, args.repeat = 4, 4, 1
    torch.set_num_threads(args.threads)

    # One engine for both, which keeps nothing from one call to the next.
    with tempfile.TemporaryDirectory() as scratch:
        write_model(args.model, Path(scratch))
        shape, device = read_shape(Path(scratch)), torch.device("cpu")
        ops = backend("fused", device).decode
        engine = TorchEngine(shape, hf_shapes(shape), device, torch.float32, args.n * args.prompts, sample_tokens, ops)
        engine.update_weights(load_file(f"{scratch}/{WEIGHTS}").items(), 0)

    # In turn, so that what else the machine does befalls both.
    seconds: dict[bool, list[float]] = {False: [], True: []}
    computed: dict[bool, int] = {}
    sampling = Sampling(1.0, 1.0, 0, args.tokens, ())
    for call in range(1 + args.repeat):
        for shared, times in seconds.items():
            asked = requests(shared, call, args.prompts, args.instruction, args.own, args.n, shape.vocab)
            begun = time.perf_counter()
            engine.generate(asked, sampling)
            times.append(time.perf_counter() - begun)
            usage = engine.kv_usage()
            assert usage
            computed[shared] = usage.prompt_tokens - usage.prompt_found

    rows = []
    print(f"{'instruction':<14}{'computed':>10}{'seconds':>10}{'rollouts/s':>12}")
    for shared, times in seconds.items():
        median = statistics.median(times[1:])
        row = {"instruction": "shared" if shared else "of each", "computed": computed[shared], "seconds": median}
        rows.append({**row, "model": args.model, "n": args.n, "prompts": args.prompts, "threads": args.threads})
        rate = args.n * args.prompts / median
        print(f"{row['instruction']:<14}{computed[shared]:>10,}{median:>10.3f}{rate:>12,.0f}")
    print(f"of each / shared: {rows[0]['seconds'] / rows[1]['seconds']:.2f}")
    write_rows(args.json, rows)


if __name__ == "__main__":
    main()
