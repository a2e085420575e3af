"""The house plan as a test: floors, no cycles, who may import what, and the size of files."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "megatron_brorl"
ROOT = PACKAGE.parent

# A room may import rooms on lower floors; rooms on one floor are strangers, but for the ground floor.
FLOORS = [
    {"errors", "types", "config", "outputs", "metrics", "progress", "model_shape", "families", "ranks"},
    {"algo", "rewards"},
    {"ops", "theory"},  # the fused ops take up formulas of algo, the theory its intervals
    {"parallel"},
    {"reshard", "rollout", "data"},
    {"models"},
    {"checkpoints"},
    {"train", "report"},
    {"cli", "__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> dict[str, Path]:
    return {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in PACKAGE.rglob("*.py")
    }


def imports(path: Path) -> set[str]:
    """Every module imported anywhere in a file, inside functions too; `from a import b` counts as a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


GRAPH = {name: imports(path) for name, path in modules().items()}


def test_every_room_has_a_floor():
    assert {room(m) for m in GRAPH} - {""} == set(LEVEL)


def test_imports_go_down():
    wrong = []
    for module, targets in GRAPH.items():
        here = room(module)
        for target in targets & GRAPH.keys():
            there = room(target)
            if not here or not there or here == there:
                continue
            same_floor = LEVEL[there] == LEVEL[here] and LEVEL[here] not in (0, len(FLOORS) - 1)
            if LEVEL[there] > LEVEL[here] or same_floor:
                wrong.append(f"{module} imports {target}")
    assert not wrong


def test_no_cycles():
    edges = {m: {t for t in targets if t in GRAPH and t != m and t != "megatron_brorl"} for m, targets in GRAPH.items()}
    packages = {m for m, p in modules().items() if p.name == "__init__.py"}
    edges = {m: targets - packages for m, targets in edges.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for target in edges[module]:
                visit(target, (*path, module))
            done.add(module)

    for module in edges:
        visit(module, ())


def test_heavy_packages_stay_in_their_rooms():
    allowed = {
        "megatron": lambda m: room(m) in ("parallel", "models", "checkpoints") or m == "megatron_brorl.train.worker",
        "tensorrt_llm": lambda m: m.startswith("megatron_brorl.rollout.remote.trtllm."),
        "reasoning_gym": lambda m: room(m) == "rewards",
    }
    for module, targets in GRAPH.items():
        for package, may in allowed.items():
            if any(t == package or t.startswith(f"{package}.") for t in targets):
                assert may(module), f"{module} imports {package}"


def test_ops_are_chosen_in_one_place():
    """ops.backend chooses; layers of csrc are built where the backend says so, and `brorl doctor` looks for csrc."""
    fused = "megatron_brorl.ops.fused"
    for module, targets in GRAPH.items():
        if any(t.startswith(fused) for t in targets) and not module.startswith(fused):
            may = module in ("megatron_brorl.ops.backend", "megatron_brorl.cli.doctor")
            assert may or module.startswith("megatron_brorl.models.layers."), f"{module} imports {fused}"


def test_package_inits_are_empty():
    for path in PACKAGE.rglob("__init__.py"):
        if path.parent != PACKAGE:
            assert path.read_text() == "", path


def test_files_are_small():
    sources = [
        p
        for d in ("megatron_brorl", "csrc", "tools", "benchmarks", "tests", "examples")
        for p in (ROOT / d).rglob("*.*")
    ]
    for path in sources:
        if path.suffix in (".py", ".cpp", ".cu", ".h", ".sh"):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path
