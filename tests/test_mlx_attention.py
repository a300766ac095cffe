"""MLX's own vector attention and row reductions, run by the CPU executor.

Expected values come from tests/ref_attention.py, never from MLX's arithmetic.
"""

import mlx.core as mx
import mlx_headers
import pytest
import ref
import ref_attention
import tolerance

import mlx_phase

SCALE = 0.125
BLOCKS = 32
#: What every function of sdpa_vector.h takes between the arrays and the attributes.
STRIDES = (
    "size_t(k_strides[1]), size_t(k_strides[2]), "
    "size_t(v_strides[1]), size_t(v_strides[2]), scale"
)
REST = ", ".join(
    (
        "bool_mask ? (const device bool*)mask : nullptr",
        "float_mask ? (const device T*)mask : nullptr",
        "int(mask_strides[3]), int(mask_strides[2]), int(mask_strides[1]), sinks",
    )
)
ONE_PASS = f"""sdpa_vector<T, D>(q, k, v, out, gqa, N, {STRIDES}, {REST}, heads,
  threadgroup_position_in_grid, threadgroups_per_grid,
  simdgroup_index_in_threadgroup, thread_index_in_simdgroup);"""
FIRST = f"""sdpa_vector_2pass_1<T, D>(q, k, v, out, sums, maxs, N, {STRIDES}, {REST},
  threads_per_threadgroup, thread_position_in_threadgroup,
  threadgroup_position_in_grid, threadgroups_per_grid, thread_index_in_simdgroup);"""
FIRST_GQA = f"""sdpa_vector_2pass_1_gqa<T, D, D, 8, 2>(q, k, v, out, sums, maxs, N,
  {STRIDES}, threadgroup_position_in_grid, threadgroups_per_grid,
  thread_position_in_threadgroup, thread_index_in_simdgroup);"""
SECOND = """sdpa_vector_2pass_2<T, D>(partials, sums, maxs, out, count,
  threadgroup_position_in_grid, threadgroups_per_grid,
  simdgroup_index_in_threadgroup, thread_index_in_simdgroup);"""


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setenv("MLX_PHASE_EXECUTOR", "cpu")


def header(**constants) -> str:
    names = ("has_mask", "query_transposed", "do_causal", "bool_mask", "float_mask")
    values = {name: False for name in (*names, "has_sinks")} | {"blocks": BLOCKS}
    return mlx_headers.header("sdpa_vector.h", **values | constants)


class Problem:
    """Random q [B, Hq, L, D] and caches whose k_len keys are a slice, as in mlx_lm."""

    def __init__(self, shape, dtype, mask="", sinks=False):
        B, heads, kv_heads, self.q_len, self.k_len, D = self.shape = shape
        mx.random.seed(sum(shape))
        self.dtype, self.kind = dtype, getattr(mx, dtype)
        self.q = self._normal(B, heads, self.q_len, D)
        room = (self.k_len + 255) // 256 * 256
        self.k = self._normal(B, kv_heads, room, D)[..., : self.k_len, :]
        self.v = self._normal(B, kv_heads, room, D)[..., : self.k_len, :]
        self.kind_of_mask = mask
        self.mask = None
        if mask in ("bool", "float"):
            seen = mx.random.uniform(shape=(B, heads, self.q_len, self.k_len)) < 0.7
            seen[0, 0, 0] = False  # a row that sees nothing
            bias = self._normal(*seen.shape)
            hidden = mx.array(-mx.inf, self.kind)
            self.mask = seen if mask == "bool" else mx.where(seen, bias, hidden)
        self.sinks = self._normal(heads) if sinks else None

    def _normal(self, *shape):
        return mx.random.normal(shape).astype(self.kind)

    def header(self) -> str:
        kind = self.kind_of_mask
        return header(
            has_mask=self.mask is not None,
            do_causal=kind == "causal",
            bool_mask=kind == "bool",
            float_mask=kind == "float",
            has_sinks=self.sinks is not None,
        )

    def run(self, name, source, outputs, groups, group, **scalars):
        """Run one kernel over `groups` threadgroups; `outputs` has (shape, dtype)s."""
        none = mx.zeros((1, 1, 1, 1), self.kind)
        arrays = {"q": self.q, "k": self.k, "v": self.v}
        arrays["mask"] = none if self.mask is None else self.mask
        arrays["sinks"] = none if self.sinks is None else self.sinks
        return run(
            name, source, self.header(), arrays | {"N": self.k_len, "scale": SCALE}
            | scalars, outputs, groups, group, self.kind, self.shape[-1],
        )  # fmt: skip

    def check(self, out):
        causal = self.kind_of_mask == "causal"
        arguments = (self.q, self.k, self.v, SCALE, self.mask, causal, self.sinks)
        right = ref_attention.attention(*arguments)
        dense = ref_attention.dense(*arguments, self.dtype)
        # What a kernel does not write stays NaN, and the oracle has none.
        tolerance.assert_close(out, right, dense, self.dtype)


def run(name, source, text, arrays, outputs, groups, group, kind, head_dim=None):
    names = ["out", "sums", "maxs"][: len(outputs)]
    template = [("T", kind)] + ([("D", head_dim)] if head_dim else [])
    return mlx_phase.metal_kernel(
        name, list(arrays), names, source, header=text, ensure_row_contiguous=False
    )(
        inputs=list(arrays.values()),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
        grid=tuple(a * b for a, b in zip(groups, group, strict=True)),
        threadgroup=group,
        template=template,
    )


def one_pass(problem):
    B, heads, kv_heads, q_len, _, _ = problem.shape
    outputs = [(problem.q.shape, problem.kind)]
    groups = (B * heads, q_len, 1)
    scalars = {"gqa": heads // kv_heads, "heads": heads}
    (out,) = problem.run(
        "sdpa_vector", ONE_PASS, outputs, groups, (1024, 1, 1), **scalars
    )
    return out


def two_pass(problem, source=FIRST):
    B, heads, kv_heads, q_len, _, D = problem.shape
    rows = (B, heads, q_len, BLOCKS)
    outputs = [((*rows, D), problem.kind), (rows, mx.float32), (rows, mx.float32)]
    groups, group = (kv_heads, B, BLOCKS), (32, heads // kv_heads, q_len)
    partials, sums, maxs = problem.run("first", source, outputs, groups, group)
    arrays = {"partials": partials, "sums": sums, "maxs": maxs, "count": BLOCKS}
    (out,) = run(
        "second", SECOND, header(), arrays, [(problem.q.shape, problem.kind)],
        (B * heads, q_len, 1), (1024, 1, 1), problem.kind, D,
    )  # fmt: skip
    return out


CASES = [
    # (B, query heads, KV heads, q_len, k_len, head_dim), dtype, mask, sinks
    ((1, 2, 2, 1, 1, 64), "float16", "", False),
    ((2, 4, 2, 1, 31, 64), "float16", "", False),
    ((1, 8, 1, 1, 1025, 128), "bfloat16", "", False),
    ((1, 4, 2, 3, 31, 64), "float32", "causal", False),
    ((2, 4, 2, 2, 70, 64), "bfloat16", "bool", False),
    ((1, 4, 1, 2, 70, 96), "float16", "float", False),
    ((2, 2, 1, 2, 33, 64), "float32", "causal", True),
]


@pytest.mark.parametrize(("shape", "dtype", "mask", "sinks"), CASES)
@pytest.mark.parametrize("route", [one_pass, two_pass])
def test_sdpa_vector(route, shape, dtype, mask, sinks):
    problem = Problem(shape, dtype, mask, sinks)
    problem.check(route(problem))


def test_sdpa_vector_with_one_read_for_eight_heads():
    problem = Problem((2, 8, 1, 1, 1025, 64), "bfloat16")
    problem.check(two_pass(problem, FIRST_GQA))


def row_reduction(kernel) -> str:
    looped = "threads_per_threadgroup.x, " if "looped" in kernel else ""
    return (
        f"{kernel}<T, float, 4>(x, out, N, threadgroup_position_in_grid.x, "
        f"thread_position_in_threadgroup.x, {looped}thread_index_in_simdgroup, "
        "simdgroup_index_in_threadgroup);"
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("kernel", "width", "threads"),
    [
        ("softmax_single_row", 130, 64),
        ("softmax_looped", 5001, 1024),
        ("logsumexp", 130, 64),
        ("logsumexp_looped", 5001, 1024),
    ],
)
def test_row_reductions(kernel, width, threads, dtype):
    """Sums over a row by several simdgroups, as in MLX's norms (not in its headers)."""
    kind = getattr(mx, dtype)
    function = kernel.partition("_")[0]
    mx.random.seed(width)
    x = (4 * mx.random.normal((3, width))).astype(kind)
    source = row_reduction(kernel)
    text = "#define SOFTMAX_N_READS 4\n" + mlx_headers.header(f"{function}.h")
    shape = x.shape if function == "softmax" else x.shape[:1]
    (out,) = run(
        kernel, source, text, {"x": x, "N": width}, [(shape, kind)], (3, 1, 1),
        (threads, 1, 1), kind,
    )  # fmt: skip
    right = getattr(ref_attention, function)(x)
    tolerance.assert_close(out, right, ref.round_to(right, dtype), dtype)
