"""`bench counters`: routes, the command, and tables that say what the kernels do."""

import csv
from dataclasses import replace

import mlx_headers
import numpy as np
import pytest

from mlx_phase.bench import __main__ as command
from mlx_phase.bench import (
    counters,
    counters_fill,
    counters_kernels,
    counters_prefill,
    counters_published,
)
from mlx_phase.chip import lookup
from mlx_phase.counters import LANES, MATRIX, Cost, Prediction, clock_ghz

M4 = "M4 Max 40"
M1, M3 = lookup("M1 Max 32"), lookup("M3 Max 40")


@pytest.mark.parametrize(
    "M, tiles", [(2, (1, 2)), (5, (1, 5)), (6, (2, 3)), (9, (2, 5)), (12, (3, 4))]
)
def test_tiles_of_qmv_wide(M, tiles):
    assert counters_kernels.vectors(M) == tiles


def test_the_published_rows_are_whole():
    with counters_published.PUBLISHED.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 100 and all(None not in row.values() for row in rows)
    for row in rows:
        assert lookup(f"{row['chip']} {row['cores']}").gpu_cores == int(row["cores"])
        assert row["against"] in ("us", "per row") or row["against"].startswith("M=")
        assert float(row["reported"]) > 0 and 0 < float(row["spread"]) < 0.1
        assert row["again"] in ("yes", "no") and row["call"] in ("queued", "waited")
        assert row["kernel"] in ("qmv", "rows", "qmm") and row["group"] in ("64", "128")
        if row["again"] == "yes":
            assert row["chip"] in counters_published.LAST_CACHE
    # A source has one harness, so one constant.
    waited = {row["source"] for row in rows if row["call"] == "waited"}
    assert not waited & {row["source"] for row in rows if row["call"] == "queued"}


def point(M: int, reported: float, N: int = 4096, **other) -> counters_published.Point:
    known = dict(source="s", chip=M3, K=4096, N=N, group=64, route="", M=M)
    known |= dict(against="us", reported=reported, spread=0.01)
    return counters_published.Point(**known | dict(again=False, waited=True) | other)


def test_the_constant_of_a_call_is_found_among_odd_points(monkeypatch):
    def kernel(p: counters_published.Point, M: int, other: str = "") -> Prediction:
        return Prediction(30.0 * M, "memory", {})

    monkeypatch.setattr(counters_published.Point, "kernel", kernel)
    found = [point(M, 75 + 30 * M) for M in range(1, 9)]
    found += [replace(p, against="M=1", reported=p.reported / 105) for p in found]
    found += [point(9, 999.0), point(10, 50.0)]
    assert counters_published.fit_call(found) == 75


@pytest.mark.parametrize("size", [0.3, 1.0, 1.2, 2.4, 4.0])
def test_what_random_replacement_keeps(size):
    """Against lines that are read in turn and lose their places to each other."""
    places = 300
    lines = int(size * places)
    rng = np.random.default_rng(0)
    held, where = np.full(places, -1), {}
    seen = []
    for i in range(12 * lines):
        line = i % lines
        seen.append(line in where)
        if seen[-1]:
            continue
        free = np.flatnonzero(held < 0)
        place = int(free[0] if len(free) else rng.integers(places))
        where.pop(int(held[place]), None)
        held[place], where[line] = line, place
    share = np.mean(seen[4 * lines :])
    assert counters_published.hits(size) == pytest.approx(share, abs=0.05)


def test_pairs_of_published_figures():
    a, b, c, d = (point(1, 100), point(2, 101.5), point(3, 130), point(4, 120))
    predicted = {a: 90.0, b: 91.0, c: 120.0, d: 150.0}
    made = counters_published.pairs(predicted, predicted)
    # a and b are within their spreads
    assert [(p.less.M, p.more.M) for p in made] == [
        (1, 3), (1, 4), (2, 3), (2, 4), (4, 3)
    ]  # fmt: skip
    assert [p.right for p in made] == [True, True, True, True, False]
    assert [p.impossible for p in made] == [False] * 4 + [True]
    assert str(made[-1]) == "4096 → 4096: M = 4 before 3"
    (alike,) = counters_published.pairs([a, c], {a: 90.0, c: 90.1})
    assert alike.right is None
    small, large = point(2, 1.4, against="M=1"), point(2, 1.2, 8192, against="M=1")
    (ratios,) = counters_published.pairs([small, large], {small: 1.0, large: 2.0})
    assert ratios.right is False and not ratios.impossible
    assert not counters_published.contradicted(made[:4])
    assert counters_published.contradicted(made) == {("s", 4096, 4096)}
    assert str(ratios) == "M = 2: 4096 → 8192 before 4096 → 4096"


def test_predictions_of_mlx_kernels_are_near_what_was_reported():
    """Three of the rows, so that a change of counters or costs is noticed."""
    mlx_headers.header(*counters_kernels.HEADERS, **counters_kernels.CONSTANTS)
    reported = {1: 129, 4: 165, 8: 323}
    with counters_kernels.on_cpu():
        for M, us in reported.items():
            _, passes = counters_kernels.mlx_route(M, M3)
            found = counters_kernels.time(passes, M, 5120, 17408, M3)
            assert found.us == pytest.approx(us, rel=0.1)
            assert found.bound == ("memory" if M == 1 else "instructions")
        _, fast = counters_kernels.mlx_route(1, M3)
        _, per_row = counters_kernels.mlx_route(4, M1)
        assert len(per_row) == 4 and per_row[0] is fast[0]


@pytest.mark.parametrize("M, cycles", [(1, 3), (7, 10), (8, 11)])
@pytest.mark.parametrize("chip", ["M3 Max 40", "M3 Ultra 80"])
def test_our_kernel_reads_no_more_than_it_must(M, cycles, chip):
    with counters_kernels.on_cpu():
        p = counters_kernels.planned(M, lookup(chip), 4096, 4096)
        mine = counters_kernels.ours(M, p)
    assert 1 <= mine.over_fetch <= 1.02
    assert mine.cost.memory_bytes == pytest.approx(0.5625 * mine.over_fetch)
    # Per weight: M multiply-adds and little more.
    assert M < mine.cost.cycles <= cycles


def test_a_fuller_core_and_a_longer_chain_take_longer(monkeypatch):
    """By hand: 2 slots of a simdgroup for each weight of a lane, and no memory to wait
    for."""
    found = counters_kernels.PerWeight(Cost(2 / LANES, 0, 0, 0), 1.0)
    monkeypatch.setattr(counters_fill, "ours", lambda *_: found)
    ultra = lookup("M3 Ultra 80")
    p = replace(counters_kernels.planned(1, ultra), rows=4, simdgroups=2)

    def us(M: int, N: int, ks: int = 1) -> float:
        plan = replace(p, k_simdgroups=ks)
        return counters_fill.Fill(M, 4096, N, plan, ultra).us

    # 8 rows a threadgroup: one for each core, 2 slots of 8 x 4096 weights on 128 lanes
    one = 8 * 4096 * 2 / 128 / clock_ghz(ultra) / 1000
    # half a simdgroup a scheduler with four chains: 2 of the 11.3 that hide an FMA
    assert us(1, 640) == pytest.approx(one * 11.3 / 2)
    assert us(8, 640) == pytest.approx(one)
    # one row more, and one core has two threadgroups
    assert us(8, 641) == pytest.approx(2 * one * 641 / 8 / 81)
    # halves of rows: twice the threadgroups, each with half the work
    assert us(8, 640, 2) == pytest.approx(one)
    assert us(1, 640, 2) == pytest.approx(one * 11.3 / 4)


@pytest.mark.parametrize("K, N, chip", [(4096, 4096, "M3 Ultra 80"), (4096, 1024, M4)])
def test_no_other_split_is_predicted_faster_for_one_row(K, N, chip):
    chip = lookup(chip)
    ks = counters_kernels.planned(1, chip, K, N).k_simdgroups
    with counters_kernels.on_cpu():
        best = counters_fill.fills(K, N, chip, ks)[0].us
        assert best <= 1.001 * counters_fill.fills(K, N, chip, 3 - ks)[0].us


def test_prefill_multiplies_more_of_its_time_than_mlx(monkeypatch):
    """From counts of a short loop; each product of 8 x 8 tiles is 512 multiply-adds."""
    mlx_headers.header(*counters_kernels.HEADERS, **counters_kernels.CONSTANTS)
    monkeypatch.setattr(counters_prefill, "K", 128)
    tile = counters_prefill.planned(512, M3).tile
    with counters_kernels.on_cpu():
        mine = counters_prefill.our_qmm.__wrapped__(tile)
        theirs = counters_prefill.mlx_qmm.__wrapped__()
    assert 0.3 < theirs.matrix_share < mine.matrix_share < 1
    assert 0 < mine.threadgroup_bytes < theirs.threadgroup_bytes
    assert 0 < mine.device_bytes < theirs.device_bytes
    for found in (mine, theirs):
        assert found.cost.fma >= MATRIX / 512
    assert mine.threadgroups(512, 14336) * 4 == theirs.threadgroups(512, 14336)


def test_update_rewrites_what_lies_between_marks(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    begin, end = "<!-- bench counters kernels -->\n", "<!-- bench counters end -->"
    page.write_text(f"a\n{begin}old\n{end}\nb\n")
    monkeypatch.setitem(counters.TABLES, "kernels", lambda: "| new |")
    assert command.main(["counters", "--update", str(page)]) == 0
    assert page.read_text() == f"a\n{begin}| new |\n{end}\nb\n"
    assert command.main(["counters", "--update", str(page)]) == 0
    assert "up to date" in capsys.readouterr().out
    assert command.main(["counters", "kernels"]) == 0
    assert capsys.readouterr().out == "| new |\n\n"


def test_bad_input_is_one_clear_error(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- bench counters speed -->\n<!-- bench counters end -->")
    assert command.main(["counters", "--update", str(page)]) == 2
    page.write_text("nothing")
    assert command.main(["counters", "--update", str(page)]) == 2
    assert command.main(["counters", "speed"]) == 2
    said = capsys.readouterr().err
    assert (
        "no such table: speed. Possible: validation, order" in said
        and "has no <!-- bench counters" in said
    )
    monkeypatch.setenv("MLX_PHASE_MLX_METAL", str(tmp_path))
    counters_kernels.mlx_qmv.cache_clear()
    assert command.main(["counters", "kernels"]) == 2
    assert "run `make headers`" in capsys.readouterr().err
