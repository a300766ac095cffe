"""What a row says about the machine: chip, device, OS, executor, versions."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import mlx.core as mx

from .. import __version__
from ..chip import CPU, Chip, detect
from ..executor import executor_name
from ..machine import apple_gpu_cores, os_name

EMULATION = (
    "CPU executor: these are times of an emulation of the kernels on this processor. "
    "They say nothing about any GPU."
)
# Where the table has no cache size: larger than any last-level cache listed in it
# that belongs to an Apple chip (96 MB, M1 Ultra).
ASSUMED_CACHE_MB = 96


@dataclass(frozen=True)
class Environment:
    """The machine of one run; `fields` are the columns of a row."""

    chip: Chip
    device: str
    os: str
    executor: str
    versions: Mapping[str, str]

    def fields(self) -> dict[str, str]:
        """Columns of `record` that are the same for every row of this process."""
        now = datetime.datetime.now(datetime.timezone.utc)
        return {
            "chip": self.chip.key,
            "device": self.device,
            "os": self.os,
            "executor": self.executor,
            "date": now.isoformat(timespec="seconds"),
            **self.versions,
        }

    @property
    def cache_bytes(self) -> float:
        """Size of the last cache before memory, as rotation has to assume it."""
        if self.executor == "cpu":
            return 0.0  # an emulation: its caches are nobody's
        return (self.chip.slc_mb or ASSUMED_CACHE_MB) * 1e6


def environment() -> Environment:
    """Describe this process's machine and executor."""
    executor = executor_name()
    info = dict(mx.device_info())
    cores = apple_gpu_cores()
    if cores:
        info["gpu_cores"] = cores
    chip = CPU if executor == "cpu" else detect(info)
    return Environment(
        chip=chip,
        device=str(info.get("device_name") or platform.processor() or "unknown"),
        os=os_name(),
        executor=executor,
        versions={
            "mlx": mx.__version__,
            "mlx_lm": _version("mlx-lm"),
            "mlx_phase": __version__,
        },
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
