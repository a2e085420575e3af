"""The commands around the theory: `brorl simulate` and `brorl advise`."""

from __future__ import annotations

import argparse
import typing
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from megatron_brorl.cli.files import aligned, make_folder, write_json
from megatron_brorl.errors import UserError
from megatron_brorl.outputs import check_output
from megatron_brorl.theory.simulate import Curves, Settings, simulate, write_csv
from megatron_brorl.theory.targets import CANDIDATES, Targets

if TYPE_CHECKING:  # the rest imports torch, which takes a second that no other command should wait for
    from megatron_brorl.theory.advisor import Advice
    from megatron_brorl.theory.costs import Costs
    from megatron_brorl.theory.log import LoggedGroup
    from megatron_brorl.theory.together import Together

_SIMULATE = {
    "vocabulary": "tokens of the softmax",
    "correct": "correct tokens among them",
    "steps": "optimizer steps",
    "lr": "learning rate",
    "beta1": "AdamW's first decay rate",
    "beta2": "AdamW's second decay rate",
    "eps": "AdamW's eps; decides the sign at small N",
    "weight_decay": "AdamW's decoupled weight decay",
    "optimizer": "adamw, or plain gradient steps",
    "seed_logit": "initial logit of the correct tokens",
    "anchor": "which class the token with anchor_logit belongs to",
    "anchor_logit": "initial logit of the anchor",
    "anchor_fixed": "hold the anchor's logit",
    "draws": "a token drawn twice counts twice or once",
    "gradient": "differentiate p (the paper) or log p (REINFORCE)",
    "baseline": "subtract the mean reward of the draws or nothing",
    "drop_against": "what the worst drop is measured against",
    "dtype": "of logits and optimizer state",
}

Commands = Any  # argparse._SubParsersAction, which is private


def add_commands(commands: Commands) -> None:
    """Add both commands to the parser of `brorl`."""
    _add_simulate(commands)
    _add_advise(commands)


def _add_simulate(commands: Commands) -> None:
    text = "the paper's token simulator: how N decides where probability mass goes"
    command = commands.add_parser("simulate", help=text, description=text)
    # Each N is simulated with each seed.
    command.add_argument("--n", type=int, nargs="+", default=[4, 8, 16, 512, 51200], help="draws per step")
    command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])

    # Every setting of the simulator is an option, of its own type.
    types = typing.get_type_hints(Settings)
    for field in fields(Settings):
        kind: Any = types[field.name]
        options: dict[str, Any] = {"default": field.default, "help": f"{_SIMULATE[field.name]} ({field.default})"}
        if kind is bool:  # --flag and --no-flag
            options["action"] = argparse.BooleanOptionalAction
        elif kind in (int, float):
            options["type"] = kind
        else:  # a choice of names
            options["choices"] = get_args(kind)
        command.add_argument(f"--{field.name.replace('_', '-')}", **options)

    # How much is written, and where.
    command.add_argument("--every", type=int, default=10, help="steps per line of curves.csv (10)")
    command.add_argument("--out", type=Path, default=Path("runs/simulate"), help="folder for simulate.png, curves.csv")
    command.add_argument("--json", type=Path, help="also write one summary row per N and seed to this file")
    command.set_defaults(command=_simulate)


def _add_advise(commands: Commands) -> None:
    text = "how many rollouts per prompt? from the rollout log of a pilot (megatron_brorl/theory/log.py has the format)"
    command = commands.add_parser("advise", help=text, description=text)
    # What is read, and what counts as right in it.
    command.add_argument(
        "log",
        type=Path,
        help="JSON Lines: prompt_id, reward, and answer or token_ids per rollout; a run with "
        "theory.log_rollouts = true writes it as run.dir/rollouts.jsonl",
    )
    command.add_argument("--n", type=int, nargs="+", default=list(CANDIDATES), help="values of N to compare")
    command.add_argument("--right", type=float, default=1.0, help="smallest reward of a right rollout (1.0)")
    # Several runs with different N tell the cost of a prompt from that of a rollout.
    command.add_argument("--run", type=Path, action="append", default=[], help="a run.dir to take the times from")

    # What a step costs, where no run is there to measure it.
    for name in ("prefill", "decode", "train", "fixed"):
        what = {"prefill": "prompt", "decode": "generated rollout", "train": "trained rollout", "fixed": "step"}[name]
        command.add_argument(f"--{name}", type=float, help=f"seconds per {what}, in place of --run")
    # What is asked of N.
    command.add_argument("--prompts", type=int, help="kept prompts per step (as many as the log has)")
    for target in fields(Targets):
        command.add_argument(f"--{target.name}", type=float, default=target.default, help=f"target ({target.default})")

    # Prompts and N weighed together, by the noise that a run has measured (theory.noise_every).
    command.add_argument(
        "--budget",
        type=float,
        help="of a step, for prompts and N together: seconds without the fixed part, or rollouts (what the log's took)",
    )
    # A budget, the intervals, and where the results go.
    command.add_argument("--tokens", type=float, help="also spread this budget of tokens over the prompts of the log")
    command.add_argument("--objective", choices=["kept", "variance"], default="kept", help="of --tokens (kept)")
    command.add_argument("--resamples", type=int, default=500, help="bootstrap samples (500)")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--out", type=Path, default=Path("runs/advise"), help="folder for advice.json, advice.png")
    command.set_defaults(command=_advise)


def _simulate(args: argparse.Namespace) -> int:
    # Imported here: matplotlib takes time that other commands should not wait for.
    from megatron_brorl.progress import progress
    from megatron_brorl.report.simulation import plot_simulation

    # Raises where a setting is out of range.
    settings = Settings(**{f.name: getattr(args, f.name) for f in fields(Settings)})
    if args.every < 1:
        raise UserError(f"--every {args.every}: must be at least 1")
    # Every N with every seed, refused before any of them runs.
    jobs = [(n, seed) for n in sorted(set(args.n)) for seed in sorted(set(args.seeds))]
    for n, seed in jobs:
        if n < 1 or seed < 0:
            raise UserError(f"--n {n} --seeds {seed}: draws must be at least 1 and seeds not negative")

    # All options are checked: a folder that cannot be made ends it before minutes of simulation.
    make_folder(args.out)
    curves: list[Curves] = []
    quarter = max(1, settings.steps // 4)  # so often a line is told

    # One bar over all of them.
    with progress(len(jobs) * settings.steps, "simulate", True) as p:
        for n, seed in jobs:
            done = len(curves) * settings.steps  # steps of the simulations before this one

            def tell(step: int, done: int = done, n: int = n, seed: int = seed) -> None:
                if step % quarter == 0:
                    p.update(done + step, {"N": str(n), "seed": str(seed)})

            curves.append(simulate(n, seed, settings, tell))

    # Curves for any tool, summaries for scripts, and the figure.
    try:
        write_csv(args.out / "curves.csv", curves, args.every)
    except OSError as e:
        raise UserError(f"{args.out / 'curves.csv'}: cannot be written: {e.strerror}") from None
    if args.json:  # the summary rows, for scripts
        write_json(args.json, [c.summary() for c in curves])
    figure = plot_simulation(curves, settings, args.out / "simulate.png")

    # A line for each, and where to look.
    rows = [("N", "seed", "Q_pos(0)", f"Q_pos({settings.steps})", "improved", "worst drop")]
    for c in curves:
        s = c.summary()
        figures = f"{s['q_pos_initial']:.4f}", f"{s['q_pos_final']:.4f}", f"{s['improved_share']:.2%}"
        rows.append((str(c.n), str(c.seed), *figures, f"{s['worst_drop']:.1e}"))
    print("\n".join(aligned(rows, right=True)))
    print(f"figure   {figure}")
    print(f"curves   {args.out / 'curves.csv'}")
    return 0


def _advise(args: argparse.Namespace) -> int:
    from megatron_brorl.report.advice import plot_advice
    from megatron_brorl.theory.advisor import advise
    from megatron_brorl.theory.log import read_log
    from megatron_brorl.theory.together import text

    # Results must not replace the log that they come from.
    check_output(args.out / "advice.json", [("the log", args.log)])

    # The pilot, what a step costs, and what is asked of N.
    groups = read_log(args.log)
    costs, how = _costs(args)
    targets = Targets(**{f.name: getattr(args, f.name) for f in fields(Targets)})
    # Options that cannot be meant.
    if args.resamples < 20:
        raise UserError(f"--resamples {args.resamples}: a 95% interval needs at least 20")
    if args.prompts is not None and args.prompts < 1:
        raise UserError(f"--prompts {args.prompts}: must be at least 1")
    candidates = sorted(set(args.n))  # ascending, as the advisor takes them
    if candidates[0] < 2:
        raise UserError(f"--n {candidates[0]}: a group baseline needs at least 2 rollouts")

    # The advice, and the plan where a budget is given: both before anything is written.
    prompts = args.prompts or len({g.prompt_id for g in groups})
    try:
        advice = advise(groups, args.right, costs, prompts, args.resamples, args.seed, targets, candidates)
    except UserError as e:  # the advisor does not know the file's name
        raise UserError(f"{args.log}: {e}") from None
    plan = _plan(args, groups) if args.tokens is not None else None  # before anything is written
    # None where no run has measured the gradient's noise.
    both = _together(args, groups, costs)

    # Targets and costs stand beside the figures, which mean nothing without them.
    make_folder(args.out)
    write_json(
        args.out / "advice.json",
        {
            **advice.as_dict(),
            "targets": asdict(targets),
            "costs": {**asdict(costs), "from": how},
            "prompts_per_step": prompts,
            "outcomes": _outcomes(groups, args.right),
            "together": None if both is None else asdict(both),
            "allocation": plan,
        },
    )
    figure = plot_advice(advice, targets, costs.unit, args.out / "advice.png")  # in the unit of the costs

    # The same for people, and where the rest is.
    print(advice_text(advice, targets, costs, prompts))
    # What stands for both where it is unknown says so.
    print(text(both, costs))
    print(f"times    {how}")
    if plan:  # of --tokens
        print(
            f"budget   {plan['tokens']:.0f} of {args.tokens:.0f} tokens: {plan['objective']} {plan['value']:.4g}, "
            f"against {plan['uniform_value']:.4g} with {plan['uniform']} rollouts for every prompt"
        )
    print(f"figure   {figure}")
    print(f"figures  {args.out / 'advice.json'}")
    return 0


def _costs(args: argparse.Namespace) -> tuple[Costs, str]:
    from megatron_brorl.theory.costs import UNMEASURED, Costs, read_costs

    given = {k: getattr(args, k) for k in ("prefill", "decode", "train", "fixed") if getattr(args, k) is not None}
    if any(not 0 <= v < float("inf") for v in given.values()) or given.get("decode") == 0:
        raise UserError("--prefill, --decode, --train, --fixed: seconds must not be negative, and --decode not 0")

    if args.run:
        if given:
            raise UserError("--run and --prefill/--decode/--train/--fixed exclude each other")
        return read_costs(args.run)
    if not given:
        return UNMEASURED, "none given (--run or --decode ...): costs are counted in generated rollouts"
    if "decode" not in given:
        raise UserError(f"--{next(iter(given))} needs --decode too")
    return Costs(**{"prefill": 0.0, "train": 0.0, **given}), "as given"


def _together(args: argparse.Namespace, groups: list[LoggedGroup], costs: Costs) -> Together | None:
    """Prompts and N for the budget; None where no run has measured the noise."""
    import numpy as np

    from megatron_brorl.theory.advisor import success_rates
    from megatron_brorl.theory.together import prices, read_noise, together

    if args.budget is not None and not 0 < args.budget < float("inf"):
        raise UserError(f"--budget {args.budget:g}: must be above 0")
    # The runs that are named, or the one whose folder has the log.
    own = args.log.parent
    runs = args.run or ([own] if (own / "metrics.jsonl").is_file() else [])

    # What a prompt costs with any number of rollouts.
    n = np.array([g.n for g in groups])
    right = np.array([int((g.rewards >= args.right).sum()) for g in groups])
    # Beyond the pilot's N the share that is trained on is that of the fitted distribution.
    rates, _ = success_rates(right, n)
    price = prices(costs, rates, max(args.n))

    # Prompts of a step of the log, which has a group for each.
    pilot = max(1, round(len(groups) / len({g.step for g in groups}))), int(n.max())
    return together(read_noise(runs), price, pilot, args.budget, args.resamples, args.seed)


def _outcomes(groups: list[LoggedGroup], right: float) -> dict[str, float] | None:
    """Good-Turing, as means over groups; None where a group has no outcomes."""
    from megatron_brorl.theory.diagnostics import good_turing

    found = [good_turing(g.outcomes, g.rewards >= right) for g in groups if g.outcomes is not None]
    if len(found) < len(groups):
        return None
    names = ("distinct", "singletons", "unseen_mass", "unseen_right", "unseen_wrong")
    return {name: sum(float(getattr(g, name)) for g in found) / len(found) for name in names}


def _plan(args: argparse.Namespace, groups: list[LoggedGroup]) -> dict[str, Any]:
    """The allocation of --tokens over the groups of the log."""
    import numpy as np

    from megatron_brorl.theory.advisor import success_rates
    from megatron_brorl.theory.allocation import allocate

    lengths = [g.tokens.mean() for g in groups if g.tokens is not None]  # mean tokens of a rollout, per group
    if len(lengths) < len(groups):
        raise UserError(f"{args.log}: --tokens needs the length of every rollout: log token_ids or tokens")

    # What the counts of each group say of its success rate, and what that is worth in rollouts.
    n = np.array([g.n for g in groups])
    right = np.array([int((g.rewards >= args.right).sum()) for g in groups])
    _, posterior = success_rates(right, n)  # [groups, G] over success rates
    levels = np.arange(8, 1025, 8)  # the rollouts that a prompt may get
    plan = allocate(posterior, np.maximum(lengths, 1.0), args.tokens, levels, args.objective)

    rollouts = [  # as the log names its groups
        {"prompt_id": g.prompt_id, "step": g.step, "n": int(k)} for g, k in zip(groups, plan.rollouts, strict=True)
    ]
    return {
        "objective": {"kept": "expected kept prompts", "variance": "minus the summed variance"}[args.objective],
        **{k: getattr(plan, k) for k in ("tokens", "value", "uniform", "uniform_value")},
        "rollouts": rollouts,
    }


def advice_text(advice: Advice, targets: Targets, costs: Costs, prompts: int) -> str:
    """The table and the recommendation."""
    from megatron_brorl.theory.costs import learning_rate_factor

    cost = f"cost per step ({costs.unit})"
    rows = [("N", "kept share", "unsampled coupling", "variance", cost, "signal/time", "targets met")]
    # A row per N, each figure marked by how it is known.
    for c in advice.candidates:
        names = ("kept", "coupling", "efficiency")
        mark = {"unbiased": " ", "ratio": "/", "extrapolated": "~", "bound": "<"}  # before the figure
        kept = f"{mark[c.kept_known]}{c.kept.mean:6.1%} ({c.kept.low:.1%} to {c.kept.high:.1%})"
        left = " unknown"  # where no answers are logged, or none came twice
        if c.coupling is not None and c.coupling_known is not None:
            left = f"{mark[c.coupling_known]}{c.coupling.mean:7.2%} ({c.coupling.low:.2%} to {c.coupling.high:.2%})"

        # A coupling that is unknown hinders no recommendation, but is not shown as met.
        known = [name for name in names if name != "coupling" or c.coupling is not None]  # targets that could be judged
        met = ", ".join(name for name, ok in zip(names, c.meets, strict=True) if ok and name in known) or "none"
        seconds = f"{c.seconds.mean:.4g} ({c.seconds.low:.4g} to {c.seconds.high:.4g})"
        rows.append((str(c.n), kept, left, f"{c.variance.mean:.2e}", seconds, f"{c.efficiency:.1%}", met))

    # The table, and what its marks mean.
    head = (
        f"{advice.prompts} prompts, {advice.groups} groups; a step keeps {prompts} prompts; 95% intervals over prompts"
    )
    lines = [head, *aligned(rows)]
    lines.append("~ extrapolated beyond the pilot's rollouts   < at most")
    if any(c.coupling is None for c in advice.candidates):
        lines.append(
            "unknown: no answers in the log, fewer than 5 rollouts of a prompt, or no answer that came twice; the "
            "recommendation leaves the coupling out"
        )
    else:
        lines.append("/ a ratio of two unbiased estimates, not unbiased itself: few prompts or rollouts bias it")

    # The recommendation, or that there is none.
    if advice.recommended is None:
        lines.append(
            f"no N up to {advice.candidates[-1].n} keeps {targets.kept:.0%} of what is ever kept, leaves at most "
            f"{targets.coupling:.0%} unsampled and has {targets.efficiency:.0%} of the best signal per time"
        )
    else:
        low, high = advice.recommended_low, advice.recommended_high
        top = f"over {advice.candidates[-1].n}"  # where no candidate meets the targets
        factor = learning_rate_factor(advice.recommended, advice.pilot_n[1])  # square root of the batch's growth
        lines.append(
            f"recommended N = {advice.recommended} (95% interval {low or top} to {high or top}); learning rate "
            f"x {factor:.2f} against the pilot's N = {advice.pilot_n[1]} with as many prompts"
        )
    return "\n".join(lines)
