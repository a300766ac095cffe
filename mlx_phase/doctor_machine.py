"""Facts about the machine for a bug report; what cannot be read is None."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from .bench.device import Environment
from .executor import ExecutorError, metal_kernel
from .machine import apple_gpu_cores, output
from .model_size import device_memory

Run = Callable[[list[str]], "str | None"]
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
# pmset's name -> what a reader calls it.
_POWER = {"0": "normal", "1": "low power", "2": "high power"}
_SMI = "clocks.sm,clocks.max.sm,temperature.gpu,power.draw,power.limit"
_SWITCHES = re.compile(r"(MLX_PHASE|MLX|MTL|METAL|CUDA_VISIBLE)_?\w*")
# Environment variables that hold folders, thus maybe a user's name.
_PATHS = ("/", "~", "\\")


def facts(env: Environment) -> dict[str, Any]:
    """Everything about the machine, in the order in which it is printed."""
    info = {} if env.executor == "cpu" else dict(mx.device_info())
    return {
        "chip": env.chip.key,
        "device": env.device,
        "gpu_cores": apple_gpu_cores() or env.chip.gpu_cores or None,
        "memory_gb": round(device_memory(info) / 1e9, 1),
        "wired_limit_gb": wired_limit_gb(info),
        "os": env.os,
        "machine": platform.machine(),
        "python": platform.python_version(),
        **env.versions,
        "executor": env.executor,
        "metal_language": metal_version(),
        "power": power(),
        "thermal": thermal(),
        "variables": variables(),
    }


def wired_limit_gb(info: dict[str, Any]) -> float | None:
    """10^9 bytes that the GPU may keep in memory; None where MLX reports no limit."""
    limit = info.get("max_recommended_working_set_size")
    return round(limit / 1e9, 1) if limit else None


def metal_version() -> str | None:
    """Language version that kernels are compiled as, asked of a kernel; 3.1, 4.0."""
    kernel = metal_kernel(
        name="mlxp_doctor_version",
        input_names=["x"],
        output_names=["y"],
        source="#ifdef __METAL_VERSION__\ny[0] = __METAL_VERSION__ + x[0];\n"
        "#else\ny[0] = x[0];\n#endif\n",
    )
    try:
        y = kernel(
            inputs=[mx.zeros((8,), mx.int32)],
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )[0].item()
    except (ExecutorError, RuntimeError):
        # The kernels below fail as well then, and say why.
        return None
    return f"{y // 100}.{y // 10 % 10}" if y else None


def power(run: Run = output, system: str | None = None) -> str | None:
    """Power mode and source on macOS; the CPU governor on Linux."""
    if (system or platform.system()) != "Darwin":
        try:
            return f"governor {GOVERNOR.read_text().strip()}"
        except OSError:
            return None
    text = run(["pmset", "-g"]) or ""
    found = re.search(r"^\s*(?:lowpowermode|powermode)\s+(\d)", text, re.M)
    drawn = re.search(r"drawing from '([^']+)'", run(["pmset", "-g", "batt"]) or "")
    parts = [_POWER.get(found[1], found[1])] if found else []
    return ", ".join(parts + ([drawn[1]] if drawn else [])) or None


def thermal(run: Run = output, system: str | None = None) -> str | None:
    """Throttling as macOS or the NVIDIA driver report it."""
    if (system or platform.system()) == "Darwin":
        text = run(["pmset", "-g", "therm"]) or ""
        limits = re.findall(r"(CPU_Speed_Limit|GPU_\w+)\s*=\s*(\d+)", text)
        if limits:
            return ", ".join(f"{name} {value}" for name, value in limits)
        return "no warning recorded" if "No thermal warning" in text else None
    query = [f"--query-gpu={_SMI}", "--format=csv,noheader"]
    text = run(["nvidia-smi", *query])
    if not text:
        return None
    values = [part.strip() for part in text.splitlines()[0].split(",")]
    if len(values) != 5:
        return None
    clock, top, heat, watts, limit = values
    return f"{clock} of {top}, {heat} C, {watts} of {limit}"


def variables() -> str:
    """Switches in the environment; of folders only that they are set."""
    found = []
    for name, value in sorted(os.environ.items()):
        if _SWITCHES.fullmatch(name):
            shown = "(a path)" if any(c in value for c in _PATHS) else value
            found.append(f"{name}={shown}")
    return ", ".join(found) or "none set"
