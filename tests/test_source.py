"""The text MLX gets: table in metal/README.md, markers, size, ASCII."""

import re

import pytest

from mlx_phase import source


def test_readme_table_matches_source():
    rows = re.findall(
        r"^\| `(\w+)` \| (.+?) \|", (source.metal_dir() / "README.md").read_text(), re.M
    )
    table = {name: tuple(re.findall(r"`([\w.]+)`", files)) for name, files in rows}
    assert table == source.KERNELS


def test_every_file_is_in_the_table():
    named = {file for files in source.KERNELS.values() for file in files}
    named |= {file for kernel in source.LEAN for file in source.lean_files(kernel)}
    assert named == {p.name for p in source.metal_dir().glob("*.[hm]*")} - {"README.md"}


@pytest.mark.parametrize(
    "kernel, lean",
    [(k, False) for k in source.KERNELS] + [(k, True) for k in source.LEAN],
)
def test_text(kernel, lean):
    text = source.load(kernel, lean=lean)
    assert text.name == f"mlxp_{kernel}{'_lean' * lean}"
    whole = text.header + text.body
    assert whole.isascii()
    assert "//" not in whole and "/*" not in whole
    # MLX copies and hashes the text on each call; host cost grows with it.
    attention = kernel.startswith("sdpa")
    fused = lean or kernel.startswith(("qmv_", "qmm", "gather"))
    tiled = "qmm_tile.h" in source.KERNELS[kernel]  # prefill: long launches
    limit = 27_500 if attention else 22_500 if tiled else 14_000 if fused else 7_000
    if kernel.startswith("sdpa_matrix"):
        limit = 45_800 if "codes" in kernel else 40_500  # codes: with the ring
    if "codes" in kernel and not attention:
        limit = 26_000  # a module where it is planned: the text is not read again
    if lean:
        limit = 15_500  # rows that share x, and neighbours that share biases
    assert len(whole) < limit
    for name in (*text.input_names, *text.output_names):
        assert re.search(rf"\b{name}\b", text.body)


def test_what_a_call_may_lack():
    whole, less = (
        source.load("sdpa_matrix_joint", without=w) for w in ((), ("sinks", "ml"))
    )
    assert (*less.input_names, "sinks") == whole.input_names
    assert (*less.output_names, "ml") == whole.output_names
    assert less.name == f"{whole.name}_no_sinks_no_ml" and less.header == whole.header
    assert less.body == "const auto ml=nullptr;\nconst auto sinks=lens;\n" + whole.body
    for name in ("lens", "mask"):
        with pytest.raises(ValueError, match=f"cannot do without {name}"):
            source.load("sdpa_matrix_joint", without=(name,))


def test_compact_keeps_directives_and_words():
    text = "#define A(x) (x)  // c\n  const int  a = b ;\n/* x\n y */\nreturn a;\n"
    assert source.compact(text) == "#define A(x) (x)\nconst int a=b;\nreturn a;\n"


@pytest.mark.parametrize("kernel", ["gemv", "gather_qmv"])
def test_others_have_one_text(kernel):
    with pytest.raises(ValueError, match=f"{kernel} has no text with the sums"):
        source.load(kernel, lean=True)


def test_unknown_kernel_is_an_error():
    with pytest.raises(KeyError):
        source.load("no_such_kernel")
