"""Chips as frozen rows of one table: bandwidth, peak rates, cache and family."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Chip:
    """One chip; ``None`` means that no figure is known, never zero.

    ``bandwidth_gbs`` is the marketed memory bandwidth (10**9 bytes/s),
    ``measured_gbs`` what a public GPU benchmark read, ``fp32_tflops`` the FMA rate,
    ``matmul_tflops`` the dense half-precision matrix rate, ``slc_mb`` the last cache
    before memory (MB), ``gpu_cores`` Apple GPU cores, NVIDIA SMs or AMD CUs,
    ``threadgroup_bytes`` what a kernel may declare (CUDA: __shared__ arrays).
    """

    name: str
    gpu_cores: int
    bandwidth_gbs: float | None
    fp32_tflops: float | None
    matmul_tflops: float | None
    slc_mb: float | None
    family: str
    arch: str
    device_class: str
    source: str
    measured_gbs: float | None = None
    memory_gb: tuple[int, ...] = ()
    threadgroup_bytes: int = 32768

    @property
    def key(self) -> str:
        """Name for file names and the command line, e.g. ``m4-max-40``."""
        return _slug(f"{self.name} {self.gpu_cores}" if self.gpu_cores else self.name)


# Columns: name | cores | GB/s | measured GB/s | FP32 TFLOPS | matmul TFLOPS | SLC MB |
# family | arch | note. TFLOPS of Apple chips are derived (cores * 256 FLOP * clock;
# matmul the same on Apple7-9, cores * 1024 * clock on Apple10); Apple publishes none.
_APPLE = """
M1       |  7 |   68 |  60 |  2.29 |   2.29 |  8 | Apple7  | g13g | a b
M1       |  8 |   68 |  60 |  2.62 |   2.62 |  8 | Apple7  | g13g | a b
M1 Pro   | 14 |  200 |   - |  4.64 |   4.64 | 24 | Apple7  | g13s | i
M1 Pro   | 16 |  200 |   - |  5.31 |   5.31 | 24 | Apple7  | g13s | i
M1 Max   | 24 |  400 |   - |  7.96 |   7.96 | 48 | Apple7  | g13s |
M1 Max   | 32 |  400 |   - | 10.62 |  10.62 | 48 | Apple7  | g13s |
M1 Ultra | 48 |  800 |   - | 15.93 |  15.93 | 96 | Apple7  | g13d |
M1 Ultra | 64 |  800 |   - | 21.23 |  21.23 | 96 | Apple7  | g13d |
M2       |  8 |  100 |  91 |  2.86 |   2.86 |  8 | Apple8  | g14g | b
M2       | 10 |  100 |  91 |  3.58 |   3.58 |  8 | Apple8  | g14g | b
M2 Pro   | 16 |  200 |   - |  5.73 |   5.73 | 24 | Apple8  | g14s |
M2 Pro   | 19 |  200 |   - |  6.80 |   6.80 | 24 | Apple8  | g14s |
M2 Max   | 30 |  400 |   - | 10.74 |  10.74 | 48 | Apple8  | g14s |
M2 Max   | 38 |  400 |   - | 13.60 |  13.60 | 48 | Apple8  | g14s |
M2 Ultra | 60 |  800 |   - | 21.47 |  21.47 |  - | Apple8  | g14d | c i
M2 Ultra | 76 |  800 |   - | 27.20 |  27.20 |  - | Apple8  | g14d | c i
M3       |  8 |  100 |  92 |  2.83 |   2.83 |  - | Apple9  | g15g | b c i
M3       | 10 |  100 |  92 |  3.53 |   3.53 |  - | Apple9  | g15g | b c i
M3 Pro   | 14 |  150 |   - |  4.95 |   4.95 |  - | Apple9  | g15s | c
M3 Pro   | 18 |  150 |   - |  6.36 |   6.36 |  - | Apple9  | g15s | c
M3 Max   | 30 |  300 |   - | 10.60 |  10.60 |  - | Apple9  | g15s |
M3 Max   | 40 |  400 |   - | 14.13 |  14.13 |  - | Apple9  | g15s |
M3 Ultra | 60 |  819 | 738 | 21.20 |  21.20 |  - | Apple9  | g15d | d c i
M3 Ultra | 80 |  819 | 738 | 28.26 |  28.26 |  - | Apple9  | g15d | d c i
M4       |  8 |  120 | 100 |  3.23 |   3.23 |  - | Apple9  | g16g | b
M4       | 10 |  120 | 100 |  4.04 |   4.04 |  - | Apple9  | g16g | b
M4 Pro   | 16 |  273 | 248 |  6.46 |   6.46 |  - | Apple9  | g16s | d c
M4 Pro   | 20 |  273 | 248 |  8.08 |   8.08 |  - | Apple9  | g16s | d c
M4 Max   | 32 |  410 |   - | 12.93 |  12.93 |  - | Apple9  | g16s |
M4 Max   | 40 |  546 |   - | 16.16 |  16.16 |  - | Apple9  | g16s |
M5       |  8 |  153 | 122 |  3.23 |  12.93 |  - | Apple10 | g17g | e
M5       | 10 |  153 | 122 |  4.04 |  16.16 |  - | Apple10 | g17g | e
M5 Pro   | 16 |  307 |   - |  6.64 |  26.54 |  - | Apple10 | g17s | c
M5 Pro   | 20 |  307 |   - |  8.29 |  33.18 |  - | Apple10 | g17s | c
M5 Max   | 32 |  460 |   - | 13.27 |  53.08 |  - | Apple10 | g17s |
M5 Max   | 40 |  614 |   - | 16.59 |  66.36 |  - | Apple10 | g17s |
M5 Ultra | 80 | 1200 |   - | 33.18 | 132.71 |  - | Apple10 | g17d | c i
M6       | 12 |  153 | 152 |  4.38 |  19.60 |  - | Apple11 | g18g | f
M6       | 12 |  170 | 152 |  4.38 |  19.60 |  - | Apple11 | g18g | f
"""

_NOTES = {
    "a": "128-bit LPDDR4X-4266, Apple published no figure",
    "b": "measured GB/s: Metal STREAM, arXiv 2502.05317 (public transcription)",
    "c": "clock inferred from a sibling chip",
    "d": "measured GB/s: DaMoN 2026 (public transcription)",
    "e": "measured GB/s: STREAM on a fanless 16 GB Air, michaelstinkerings.org",
    "f": "TFLOPS and GB/s measured, aminems/AppleSiliconFFT; 153 or 170 GB/s by memory",
    "i": "architecture string inferred or from the toolchain, not observed",
}
# Memory sizes that tell two parts of one name apart (youssofal/MTPLX issue 64).
_MEMORY_GB = {("M4 Max", 32): (36,), ("M4 Max", 40): (48, 64, 128)}

_SHEET = "vendor data sheet: marketed bandwidth, dense half-precision rate"
_SHARED = 49152  # of a CUDA kernel that asks for no more at its launch
_GPUS = (
    Chip(
        *("H100 SXM", 132, 3350, 66.9, 989, 50, "Hopper", "sm_90", "nvidia", _SHEET),
        threadgroup_bytes=_SHARED,
    ),
    Chip(
        "H200",
        *(132, 4800, 66.9, 989, 60, "Hopper", "sm_90", "nvidia"),
        f"{_SHEET}; L2 size as the device reports it",
        threadgroup_bytes=_SHARED,
    ),
    Chip(
        *("A100 80GB", 108, 2039, 19.5, 312, 40, "Ampere", "sm_80", "nvidia", _SHEET),
        threadgroup_bytes=_SHARED,
    ),
    Chip(
        "MI300X", 304, 5300, 163.4, 1300, 256, "CDNA3", "gfx942", "amd", _SHEET
    ),
)  # fmt: skip
_GPU_NAMES = (
    (r"H100 80GB HBM3|H100 SXM", "H100 SXM"),
    (r"H200(?! NVL)", "H200"),
    (r"A100-SXM4-80GB", "A100 80GB"),
    (r"MI300X", "MI300X"),
)

CPU = Chip(
    "CPU", 0, None, None, None, None, "CPU", "cpu", "cpu",
    "an emulation has no roofline, so no bandwidth is claimed",
)  # fmt: skip
UNKNOWN = Chip(
    "unknown", 10, None, None, None, None, "unknown", "unknown", "unknown",
    "no row of the table matched this device",
)  # fmt: skip


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _number(cell: str) -> float | None:
    return None if cell == "-" else float(cell)


def _apple_row(line: str) -> Chip:
    name, cores, *figures, family, arch, note = (c.strip() for c in line.split("|"))
    bandwidth, measured, fp32, matmul, slc = map(_number, figures)
    notes = [_NOTES[letter] for letter in note.split()]
    base = "public chip table (Apple newsroom and support pages); TFLOPS derived"
    return Chip(
        name=name,
        gpu_cores=int(cores),
        bandwidth_gbs=bandwidth,
        fp32_tflops=fp32,
        matmul_tflops=matmul,
        slc_mb=slc,
        family=family,
        arch=f"applegpu_{arch}",
        device_class=arch[-1],
        source="; ".join([base, *notes]),
        measured_gbs=measured,
        memory_gb=_MEMORY_GB.get((name, int(cores)), ()),
    )


_APPLE_CHIPS = tuple(_apple_row(row) for row in _APPLE.strip().splitlines())
# First match wins; the last row is the chip that nobody knows.
CHIPS: tuple[Chip, ...] = (*_APPLE_CHIPS, *_GPUS, CPU, UNKNOWN)


def lookup(name: str) -> Chip:
    """Row for a name such as ``m4-max``, ``"Apple M4 Max"`` or ``m4-max-32``.

    A name that several parts share gives the one with most cores (then bandwidth);
    append the core count (``m4-max-32``) or also the bandwidth (``m6-12-153``).
    Raises ValueError that names the nearest rows.
    """
    wanted = re.sub(r"^(apple|nvidia|amd)-", "", _slug(name)).removesuffix("-cores")
    names: dict[str, Chip] = {}
    for chip in CHIPS:
        keys = {_slug(chip.name), chip.key}
        if chip.bandwidth_gbs:
            keys.add(f"{chip.key}-{chip.bandwidth_gbs:g}")
        for key in keys:
            best = names.get(key)
            if best is None or _size(chip) > _size(best):
                names[key] = chip
    flat = {key.replace("-", ""): chip for key, chip in names.items()}
    found = names.get(wanted) or flat.get(wanted.replace("-", ""))
    longer = {c.name: c for k, c in names.items() if k.startswith(f"{wanted}-")}
    if found is None and len(longer) == 1:
        found = next(iter(longer.values()))
    if found is not None:
        return found
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
    hint = f"did you mean {', '.join(near)}?" if near else "see mlx_phase.chip.CHIPS"
    raise ValueError(f"unknown chip {name!r}: {hint}")


def _size(chip: Chip) -> tuple[int, float]:
    return chip.gpu_cores, chip.bandwidth_gbs or 0.0


def detect(info: Mapping[str, object] | None) -> Chip:
    """Chip of a ``mx.device_info()`` dict, to which the caller may add ``gpu_cores``.

    None says that there is no GPU and gives the CPU row. Where the dict can't tell two
    parts of one name apart, the smaller core count is taken and the bandwidth is left
    unknown rather than guessed.
    """
    if info is None:
        return CPU
    device = str(info.get("device_name", "")).strip()
    arch = str(info.get("architecture", "")).strip()
    if arch.startswith("applegpu_"):
        return _detect_apple(device.removeprefix("Apple "), arch, info)
    for pattern, name in _GPU_NAMES:
        if re.search(pattern, device):
            return lookup(name)
    if arch.startswith(("sm_", "gfx")):
        vendor = "nvidia" if arch.startswith("sm_") else "amd"
        return replace(
            UNKNOWN, name=device or arch, gpu_cores=108, arch=arch, device_class=vendor
        )
    if arch in ("x86_64", "amd64", "AMD64", "aarch64", "arm64", "i386"):
        return CPU
    return UNKNOWN


def _detect_apple(name: str, arch: str, info: Mapping[str, object]) -> Chip:
    rows = [chip for chip in _APPLE_CHIPS if chip.name == name]
    cores = info.get("gpu_cores")
    size = info.get("memory_size") or info.get("total_memory")
    if isinstance(cores, int):
        rows = [chip for chip in rows if chip.gpu_cores == cores]
    elif isinstance(size, int):
        memory_gb = round(size / 2**30)
        rows = [c for c in rows if not c.memory_gb or memory_gb in c.memory_gb]
    if not rows:
        shown = name or "unknown Apple GPU"
        return replace(UNKNOWN, name=shown, arch=arch, device_class=arch[-1])
    chip = min(rows, key=_size)
    if len({row.bandwidth_gbs for row in rows}) > 1:
        why = "bandwidth differs between parts of this name and could not be told"
        return replace(chip, bandwidth_gbs=None, source=f"{chip.source}; {why}")
    return chip
