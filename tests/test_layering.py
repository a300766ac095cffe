"""The direction of imports, the line budgets and the alphabet of the kernel text.

The table FLOW is the one CONTRIBUTING.md describes: a module imports only from rows
above its own. A module outside the table fails, so a new one is placed on purpose.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mlx_phase"

# From left to right. Modules of one row do not import each other.
FLOW = (
    {"chip", "problem", "model_error", "arguments", "machine", "preset_configs"}
    | {"command"},
    {"roofline", "shapes_config", "counters"},
    {"plan", "plan_attention", "shapes"},
    {"plan_exact"},
    {"plan_prefill_attention"},
    {"source", "step", "predict_data", "plan_matrix", "plan_qmm"},
    {"predict_fit", "plan_gather"},
    {"predict_table"},
    {"predict"},
    {"executor"},
    {"launch", "routes", "pytest_plugin", "class_swap", "module_watch", "rollback"},
    {"ops", "attention_ops", "gather_ops", "tune_plans", "rotary"},
    {"siblings", "step_cache", "block_launch"},
    {"parents", "joint_step", "attention_step"},
    {"layers", "cache_kinds", "cache_joint"},
    {"block_match", "joint_kinds", "switch_layers"},
    {"cache_groups", "trace"},
    {"traced"},
    {"block_step", "gated"},
    {"block", "check", "tune_store", "attention_hooks", "patch_scan"},
    {"step_patch", "gather_check"},
    {"patch_report", "attention_check", "exact"},
    {"fuse", "patch_attention", "patch_experts"},
    {"patch", "presets", "byte_tokenizer", "model_size", "gguf_q4k", "speculate"},
    {"gguf", "patch_scope"},
    {"gguf_llama", "gguf_tokenizer"},
    {"models"},
    {"model_config"},
    {"bench"},
    {"tune_probe", "doctor_kernels", "doctor_machine"},
    {"tune_race", "doctor_attention", "doctor_experts", "doctor_fused"},
    {"tune_table"},
    {"tune_course"},
    {"report", "doctor", "tune", "cli"},
)
RANK = {module: rank for rank, row in enumerate(FLOW) for module in row}
# Takes anyone's kernel, so it knows nothing of ours.
STANDALONE = {"executor"}
# Pure Python: they plan for any chip on a machine without MLX.
WITHOUT_MLX = {"chip", "problem", "roofline", "plan", "shapes", "shapes_config", "step"}
WITHOUT_MLX |= {
    "plan_attention",
    "plan_prefill_attention",
    "plan_matrix",
    "plan_exact",
    "plan_qmm",
    "counters",
}
WITHOUT_MLX |= {"plan_gather"}
WITHOUT_MLX |= {"predict_data", "predict_fit", "predict_table", "predict"}
# The modules that may know mlx-lm's classes: those that patch and those that load.
WITH_MLX_LM = {"patch", "layers", "bench", "models", "presets", "speculate"}
WITH_MLX_LM |= {
    "cache_joint",
    "cache_kinds",
    "joint_kinds",
    "step_patch",
    "patch_experts",
}
WITH_MLX_LM |= {"gguf", "gguf_llama", "gguf_tokenizer", "byte_tokenizer", "model_size"}
# Files that may touch MLX's own custom-kernel calls: everyone else asks the executor.
KERNEL_CALLS = {"metal_kernel": "executor", "cuda_kernel": "executor"}

PYTHON = sorted(
    path
    for folder in (PACKAGE, ROOT / "tests", ROOT / "bench")
    for path in folder.rglob("*.py")
)
METAL = sorted((ROOT / "metal").glob("*.metal")) + sorted((ROOT / "metal").glob("*.h"))
MSL = METAL + sorted((PACKAGE / "executor" / "include").glob("*.h"))


def module_of(path: Path, package: Path = PACKAGE) -> str:
    """First name below the package: `launch` for mlx_phase/launch/matmul.py."""
    parts = path.relative_to(package).with_suffix("").parts
    return parts[0]


def imports(path: Path, package: Path = PACKAGE) -> set[str]:
    """Absolute dotted names that a file imports, at any depth in the file."""
    own = [package.name, *path.relative_to(package).with_suffix("").parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # `from . import x` names modules; one dot is the folder of the file.
            parent = own[: len(own) - node.level] if node.level else []
            base = ".".join(parent + ([node.module] if node.module else []))
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def top(name: str) -> str:
    return name.split(".")[0]


def violations(path: Path, package: Path = PACKAGE) -> list[str]:
    """What the file imports against the rules, in words; empty if nothing."""
    module = module_of(path, package)
    if module == "__init__":
        return []
    if module not in RANK:
        return [f"{module} has no place in FLOW: put it there and in CONTRIBUTING.md"]
    names = imports(path, package)
    inner = {n.split(".")[1] for n in names if n.startswith(package.name + ".")}
    bad = [
        f"{module} imports {other}, which is not to its left"
        for other in sorted(inner & RANK.keys() - {module})
        if RANK[other] >= RANK[module] or module in STANDALONE
    ]
    if module in WITHOUT_MLX and {"mlx", "mlx_lm"} & {top(n) for n in names}:
        bad.append(f"{module} imports mlx, and must run without it")
    if module not in WITH_MLX_LM and "mlx_lm" in {top(n) for n in names}:
        bad.append(f"{module} imports mlx_lm: only {sorted(WITH_MLX_LM)} may")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        # mx.fast.metal_kernel(...); the executor's own function is called by name.
        if isinstance(node, ast.Attribute) and node.attr in KERNEL_CALLS:
            through_fast = ast.unparse(node.value).endswith("fast")
            if through_fast and module != KERNEL_CALLS[node.attr]:
                bad.append(f"{module} calls {ast.unparse(node)}: ask the executor")
    return bad


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=name_of)
def test_imports_only_from_the_left(path):
    assert violations(path) == []


def test_every_command_takes_an_interrupt_and_a_closed_pipe():
    entry = 'if __name__ == "__main__":'
    commands = [
        p for p in PYTHON if p.parent.name != "tests" and entry in p.read_text()
    ]
    assert len(commands) >= 6
    assert [p for p in commands if "command.run(main" not in p.read_text()] == []


@pytest.mark.parametrize("path", PYTHON + METAL, ids=name_of)
def test_line_budget(path):
    budget = 300 if path.suffix == ".py" else 400
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= budget, f"{lines} lines: split it, the budget is {budget}"


@pytest.mark.parametrize("path", MSL, ids=name_of)
def test_kernel_text_is_ascii(path):
    rows = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    assert [number for number, row in rows if not row.isascii()] == []


@pytest.mark.parametrize("module", sorted(WITHOUT_MLX))
def test_planning_modules_are_there(module):
    # The rule above would say nothing about a module that was renamed.
    assert (PACKAGE / f"{module}.py").is_file()


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("plan.py", "import mlx.core as mx", "must run without it"),
        ("chip.py", "def f():\n    from mlx import core", "must run without it"),
        ("chip.py", "from mlx_phase.plan import plan", "not to its left"),
        ("launch/matmul.py", "from ..ops import linear", "not to its left"),
        ("launch/matmul.py", "from .. import ops", "not to its left"),
        ("executor/cpu.py", "import mlx_phase.launch.matmul", "not to its left"),
        ("executor/cpu.py", "from mlx_phase.chip import Chip", "not to its left"),
        ("check.py", "from mlx_lm import load", "only"),
        ("ops.py", "mx.fast.metal_kernel(name='k')", "ask the executor"),
        ("novel.py", "", "no place in FLOW"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, text, complaint):
    path = tmp_path / "mlx_phase" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = violations(path, tmp_path / "mlx_phase")
    assert len(found) == 1 and complaint in found[0]


def test_allowed_imports_pass(tmp_path):
    path = tmp_path / "mlx_phase" / "launch" / "matmul.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import mlx.core as mx\nfrom . import scratch\nfrom ..plan import Plan\n"
        "from mlx_phase.executor import metal_kernel\nmetal_kernel(name='k')\n"
    )
    assert violations(path, tmp_path / "mlx_phase") == []
