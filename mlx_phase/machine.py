"""What the operating system says about the machine; unreadable facts are None."""

from __future__ import annotations

import platform
import re
import subprocess


def os_name() -> str:
    """Operating system with the build, since kernels change with it."""
    if platform.system() == "Darwin":
        build = output(["sw_vers", "-buildVersion"])
        return f"macOS {platform.mac_ver()[0]} ({build or 'build unknown'})"
    if platform.system() == "Linux":
        try:
            name = platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
        except OSError:
            name = "Linux"
        return f"{name}, kernel {platform.release()}"
    return platform.platform()


def apple_gpu_cores() -> int | None:
    """GPU cores from the I/O registry: MLX does not report them. None off macOS."""
    if platform.system() != "Darwin":
        return None
    text = output(["ioreg", "-rc", "AGXAccelerator", "-d", "1"]) or ""
    found = re.search(r'"gpu-core-count"\s*=\s*(\d+)', text)
    return int(found.group(1)) if found else None


def output(command: list[str]) -> str | None:
    """What a command prints, None if it is missing, fails or takes 10 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
