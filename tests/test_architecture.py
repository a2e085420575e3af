"""Structure of the package: layers, no import cycles, who may import what, and the size of files."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_brorl"

# A part of the package (a room) may import rooms on lower floors. Rooms of one floor may not import each other, except
# on the lowest and the highest floor.
FLOORS = [
    {"errors", "types", "config", "rollout_log", "files", "tracking", "families", "signals", "user_functions"},
    {"algo", "rewards"},
    # The fused ops take up formulas of algo, the theory its intervals. Environments run in the workers of rewards.
    {"ops", "theory", "environments"},
    {"parallel"},
    {"rollout", "data"},
    {"models"},
    {"checkpoints"},
    {"train", "report"},
    {"cli", "api", "__main__"},
]
LEVEL = {name: level for level, rooms in enumerate(FLOORS) for name in rooms}


def room(module: str) -> str:
    """Return the part of the package that a module is in: "train" of megatron_brorl.train.trainer."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports(path: Path) -> set[str]:
    """Return every module imported anywhere in a file; `from a import b` counts as a and a.b."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return a cycle for every module at which a walk along the imports comes back to its own path."""
    closed_paths: list[list[str]] = []
    visited: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            closed_paths.append([*path[path.index(module) :], module])
        elif module not in visited:
            for target in sorted(graph[module]):
                visit(target, [*path, module])
            visited.add(module)

    for module in sorted(graph):
        visit(module, [])
    return closed_paths


MODULES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in PACKAGE.rglob("*.py")
}
GRAPH = {name: imports(path) for name, path in MODULES.items()}


def test_every_room_has_a_floor():
    assert {room(m) for m in GRAPH} - {""} == set(LEVEL)


def test_imports_go_down():
    wrong = []
    for module, targets in GRAPH.items():
        importer = room(module)
        for target in targets & GRAPH.keys():
            imported = room(target)
            if not importer or not imported or importer == imported:
                continue
            forbidden_neighbour = LEVEL[imported] == LEVEL[importer] and LEVEL[importer] not in (0, len(FLOORS) - 1)
            if LEVEL[imported] > LEVEL[importer] or forbidden_neighbour:
                wrong.append(f"{module} imports {target}")
    assert not wrong


def test_no_cycles():
    files = {m for m, path in MODULES.items() if path.name != "__init__.py"}
    assert not cycles({m: (GRAPH[m] & files) - {m} for m in files})


def test_heavy_packages_stay_in_their_rooms():
    allowed = {
        "megatron": lambda m: room(m) in ("parallel", "models", "checkpoints") or m == "megatron_brorl.train.worker",
        "tensorrt_llm": lambda m: m.startswith("megatron_brorl.rollout.remote.trtllm."),
        "vllm": lambda m: m.startswith("megatron_brorl.rollout.remote.vllm."),
        "reasoning_gym": lambda m: room(m) == "rewards",
        "latex2sympy2_extended": lambda m: m == "megatron_brorl.rewards.verifiers.math_values",
        "sympy": lambda m: m == "megatron_brorl.rewards.verifiers.math_values",
    }
    for module, targets in GRAPH.items():
        for package, is_allowed in allowed.items():
            if any(t == package or t.startswith(f"{package}.") for t in targets):
                assert is_allowed(module), f"{module} imports {package}"


def test_ops_are_chosen_in_one_place():
    """Only ops.backend, the layers that it selects and `brorl doctor` import ops.fused."""
    fused = "megatron_brorl.ops.fused"
    for module, targets in GRAPH.items():
        if any(t.startswith(fused) for t in targets) and not module.startswith(fused):
            is_allowed = module in ("megatron_brorl.ops.backend", "megatron_brorl.cli.preflight")
            assert is_allowed or module.startswith("megatron_brorl.models.layers."), f"{module} imports {fused}"


def test_package_inits_are_empty():
    for path in PACKAGE.rglob("__init__.py"):
        if path.parent != PACKAGE:
            assert path.read_text() == "", path


def test_files_are_small():
    folders = ("megatron_brorl", "csrc", "tools", "benchmarks", "tests", "examples")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    for path in sources:
        if path.suffix in (".py", ".cpp", ".cu", ".h", ".sh"):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 600, path
