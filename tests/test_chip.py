"""The chip table: names, detection, and figures that must hang together."""

import re

import pytest

from mlx_phase import chip as chips
from mlx_phase.chip import CHIPS, CPU, UNKNOWN, detect, lookup


def apple(name, arch, **more):
    return {"device_name": f"Apple {name}", "architecture": f"applegpu_{arch}"} | more


APPLE = [c for c in CHIPS if c.arch.startswith("applegpu")]


def test_table_is_complete_and_ends_with_the_unknown_chip():
    assert len(APPLE) == 39  # 38 chip x core-count rows, and the M6 has two
    assert CHIPS[-1] is UNKNOWN
    assert len({(c.name, c.gpu_cores, c.bandwidth_gbs) for c in CHIPS}) == len(CHIPS)
    assert {"H100 SXM", "H200", "A100 80GB", "MI300X"} <= {c.name for c in CHIPS}


@pytest.mark.parametrize("chip", APPLE, ids=lambda c: f"{c.key}-{c.bandwidth_gbs:g}")
def test_apple_rows_hang_together(chip):
    assert re.fullmatch(r"applegpu_g1[3-8][gsd]", chip.arch)
    assert chip.device_class == chip.arch[-1]
    assert chip.measured_gbs is None or chip.measured_gbs <= chip.bandwidth_gbs
    # 128 FMA a core and clock, at 1.2 .. 1.7 GHz.
    clock_ghz = chip.fp32_tflops * 1e3 / (chip.gpu_cores * 256)
    assert 1.2 < clock_ghz < 1.7
    neural = chip.family in ("Apple10", "Apple11")
    ratio = chip.matmul_tflops / chip.fp32_tflops
    assert ratio == pytest.approx(4.0 if neural else 1.0, rel=0.13)
    assert chip.source


@pytest.mark.parametrize(
    "name, cores, bandwidth",
    [
        ("m4-max", 40, 546),
        ("M4 Max", 40, 546),
        ("Apple M4 Max", 40, 546),
        ("m4max", 40, 546),
        ("m4-max-32", 32, 410),
        ("M3 Max/30", 30, 300),
        ("m5-ultra", 80, 1200),
        ("m6", 12, 170),
        ("m6-12-153", 12, 153),
        ("h200", 132, 4800),
        ("NVIDIA H200", 132, 4800),
        ("h100", 132, 3350),
        ("a100", 108, 2039),
        ("mi300x", 304, 5300),
    ],
)
def test_lookup_takes_names_as_people_write_them(name, cores, bandwidth):
    chip = lookup(name)
    assert (chip.gpu_cores, chip.bandwidth_gbs) == (cores, bandwidth)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda c: c.key)
def test_every_row_is_found_by_its_key(chip):
    assert lookup(chip.key).name == chip.name
    assert lookup(chip.key).gpu_cores == chip.gpu_cores


def test_a_near_miss_is_suggested():
    with pytest.raises(ValueError, match=r"unknown chip 'm4-mx': did you mean m4-max"):
        lookup("m4-mx")
    with pytest.raises(ValueError, match="see mlx_phase.chip.CHIPS"):
        lookup("zzzzzz")


@pytest.mark.parametrize(
    "info, name, cores, bandwidth",
    [
        (apple("M1", "g13g"), "M1", 7, 68),
        (apple("M2 Ultra", "g14d", gpu_cores=76), "M2 Ultra", 76, 800),
        (apple("M3 Max", "g15s", gpu_cores=40), "M3 Max", 40, 400),
        (apple("M3 Max", "g15s", gpu_cores=30), "M3 Max", 30, 300),
        # Memory tells the two M4 Max apart: 36 GB or 48 and more.
        (apple("M4 Max", "g16s", memory_size=36 * 2**30), "M4 Max", 32, 410),
        (apple("M4 Max", "g16s", memory_size=64 * 2**30), "M4 Max", 40, 546),
        # Nothing tells these apart: no bandwidth is better than a wrong one.
        (apple("M3 Max", "g15s", memory_size=64 * 2**30), "M3 Max", 30, None),
        (apple("M6", "g18g", gpu_cores=12), "M6", 12, None),
        ({"device_name": "NVIDIA H200", "architecture": "sm_90"}, "H200", 132, 4800),
        (
            {"device_name": "NVIDIA H100 80GB HBM3", "architecture": "sm_90"},
            "H100 SXM",
            132,
            3350,
        ),
        (
            {"device_name": "NVIDIA A100-SXM4-80GB", "architecture": "sm_80"},
            "A100 80GB",
            108,
            2039,
        ),
        ({"device_name": "AMD EPYC", "architecture": "x86_64"}, "CPU", 0, None),
        ({"device_name": "Apple M4 Pro", "architecture": "arm64"}, "CPU", 0, None),
        (None, "CPU", 0, None),
        ({}, "unknown", UNKNOWN.gpu_cores, None),
    ],
)
def test_detect(info, name, cores, bandwidth):
    chip = detect(info)
    assert (chip.name, chip.gpu_cores, chip.bandwidth_gbs) == (name, cores, bandwidth)


def test_detect_keeps_the_architecture_of_chips_without_a_row():
    new = detect(apple("M9 Pro", "g23s"))
    assert (new.name, new.arch, new.device_class) == ("M9 Pro", "applegpu_g23s", "s")
    assert new.family == UNKNOWN.family and new.bandwidth_gbs is None
    gpu = detect({"device_name": "NVIDIA H100 PCIe", "architecture": "sm_90"})
    assert (gpu.arch, gpu.device_class) == ("sm_90", "nvidia")
    assert gpu.bandwidth_gbs is None  # not the SXM part: 2000, not 3350 GB/s


def test_a_binned_part_that_is_not_in_the_table_is_not_given_a_neighbours_figures():
    chip = detect(apple("M4 Max", "g16s", gpu_cores=36))
    assert chip.bandwidth_gbs is None and chip.name == "M4 Max"


def test_the_cpu_claims_no_roofline():
    assert CPU.bandwidth_gbs is None and CPU.matmul_tflops is None
    assert chips.CPU in CHIPS
