"""Checks of matmul arguments: one clear error before anything is launched."""

import mlx.core as mx
import numpy as np

DTYPES = {mx.float16: "float16", mx.bfloat16: "bfloat16", mx.float32: "float32"}
# mode -> (group sizes, bits); the first of each is MLX's default.
MODES = {
    "affine": ((64, 32, 128), (4, 1, 2, 3, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "mxfp8": ((32,), (8,)),
    "nvfp4": ((16,), (4,)),
}


def fail(what: str, fix: str, op: str = "quantized_matmul") -> None:
    """Raise the ValueError of this module."""
    raise ValueError(f"{op}: {what}; {fix}")


def defaults(mode: str, group_size: int | None, bits: int | None) -> tuple[int, int]:
    """(group_size, bits) with MLX's defaults filled in; ValueError if not allowed."""
    if mode not in MODES:
        fail(f"unknown mode {mode!r}", f"use one of {', '.join(MODES)}")
    groups, widths = MODES[mode]
    group_size = groups[0] if group_size is None else group_size
    bits = widths[0] if bits is None else bits
    if group_size not in groups:
        fail(f"group_size {group_size} with mode {mode!r}", f"use one of {groups}")
    if bits not in widths:
        fail(f"bits {bits} with mode {mode!r}", f"use one of {widths}")
    return group_size, bits


def check_quantized(x, w, scales, biases, transpose, group_size, bits, mode) -> None:
    """ValueError unless the arrays belong together (TypeError: not arrays)."""
    for name, a in (("x", x), ("w", w), ("scales", scales), ("biases", biases)):
        if not isinstance(a, mx.array) and not (name == "biases" and a is None):
            raise TypeError(
                f"quantized_matmul: {name} is a {type(a).__name__}; pass an mx.array"
            )
    if x.ndim < 1:
        fail("x has no dimension", "pass x of shape (..., K)")
    if w.ndim < 2:
        fail(f"w has shape {w.shape}", "pass packed weights of shape (..., N, words)")
    if w.dtype != mx.uint32:
        fail(f"w is {w.dtype}", "pass the uint32 words that mx.quantize gives")
    if mode == "affine":
        if biases is None:
            fail("biases are missing", "affine weights need the biases of mx.quantize")
        if biases.shape != scales.shape:
            fail(
                f"scales {scales.shape} and biases {biases.shape} differ in shape",
                "pass both as mx.quantize gave them",
            )
    elif biases is not None:
        fail(f"biases given with mode {mode!r}", "that mode has none: pass None")
    _check_dtypes(x, scales, biases, mode)
    columns = w.shape[-1] * 32 // bits
    want = (*w.shape[:-1], columns // group_size)
    if columns % group_size or tuple(scales.shape) != want:
        fail(
            f"scales have shape {scales.shape} for w {w.shape}",
            f"with {bits} bits and group_size {group_size} they must be {want}",
        )
    k = columns if transpose else w.shape[-2]
    if x.shape[-1] != k:
        fail(
            f"x {x.shape} ends in {x.shape[-1]} but the weights {w.shape} take K = {k} "
            f"({bits} bits, transpose={transpose})",
            f"pass x of shape (..., {k})",
        )


def _check_dtypes(x, scales, biases, mode: str) -> None:
    if mode != "affine":
        if scales.dtype != mx.uint8:
            fail(f"scales are {scales.dtype}", f"mode {mode!r} has uint8 scales")
        if not mx.issubdtype(x.dtype, mx.floating):
            fail(f"x is {x.dtype}", "pass floating point activations")
        return
    for name, a in (("scales", scales), ("biases", biases)):
        if not mx.issubdtype(a.dtype, mx.floating):
            fail(f"{name} are {a.dtype}", "affine weights have floating point ones")
    if mx.issubdtype(x.dtype, mx.complexfloating):
        fail(f"x is {x.dtype}", "pass real activations")


def check_linear(x, weight, bias) -> None:
    """ValueError unless x [..., K], weight [N, K] and bias [N] belong together."""
    for name, a in (("x", x), ("weight", weight), ("bias", bias)):
        if not isinstance(a, mx.array) and not (name == "bias" and a is None):
            raise TypeError(f"linear: {name} is a {type(a).__name__}; pass an mx.array")
    if weight.ndim != 2:
        fail(f"weight has shape {weight.shape}", "pass (N, K)", "linear")
    if x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        fail(
            f"x has shape {x.shape} and weight {weight.shape}",
            f"pass x of shape (..., {weight.shape[1]})",
            "linear",
        )
    if bias is not None and bias.shape != (weight.shape[0],):
        fail(f"bias has shape {bias.shape}", f"pass ({weight.shape[0]},)", "linear")


def product(x_shape, w_shape, transpose: bool, bits: int) -> tuple[tuple, int]:
    """(output shape, K) of x times packed weights."""
    columns = w_shape[-1] * 32 // bits
    n, k = (w_shape[-2], columns) if transpose else (columns, w_shape[-2])
    if len(w_shape) == 2:
        return (*x_shape[:-1], n), k
    if len(x_shape) == 1:
        return (n,), k
    rows = x_shape[-2:-1]
    try:
        batch = np.broadcast_shapes(tuple(x_shape[:-2]), tuple(w_shape[:-2]))
    except ValueError:
        fail(
            f"batch dimensions of x {x_shape} and w {w_shape} do not broadcast",
            "make them equal or 1",
        )
    return (*batch, *rows, n), k


def check_attention(q, k, v, mask, sinks, group_size: int, bits: int) -> None:
    """ValueError unless q, k, v, mask and sinks belong together (TypeError: no array).

    q [B, Hq, q_len, D]; k [B, Hkv, k_len, D] and v [B, Hkv, k_len, Dv], or triples of
    packed words, scales and biases; mask None, "causal" or broadcastable to
    [B, Hq, q_len, k_len]; sinks [Hq].
    """

    def wrong(what: str, fix: str) -> None:
        fail(what, fix, "attention")

    sides = {"k": k, "v": v}
    parts = {"q": q} if sinks is None else {"q": q, "sinks": sinks}
    for name, a in sides.items():
        if isinstance(a, tuple | list):
            if len(a) != 3:
                wrong(f"{name} has {len(a)} parts", "pass words, scales and biases")
            names = (f"words of {name}", f"scales of {name}", f"biases of {name}")
            parts |= dict(zip(names, a, strict=True))
        else:
            parts[name] = a
    for name, a in parts.items():
        if not isinstance(a, mx.array):
            raise TypeError(
                f"attention: {name} is a {type(a).__name__}; pass an mx.array"
            )
        if a.ndim != 4 and name != "sinks":
            wrong(
                f"{name} has shape {a.shape}", "pass (batch, heads, length, head_dim)"
            )
    if isinstance(k, mx.array) != isinstance(v, mx.array):
        wrong("one of k and v is quantised", "quantise both or none")
    B, Hq, q_len, D = q.shape
    shapes = {n: _logical(n, a, group_size, bits, wrong) for n, a in sides.items()}
    if shapes["k"][:3] != shapes["v"][:3]:
        wrong(f"k is {shapes['k']} and v {shapes['v']}", "pass keys and values alike")
    if shapes["k"][0] != B:
        wrong(
            f"q has batch {B}, k {shapes['k'][0]}", "pass one cache row for each of q"
        )
    if shapes["k"][3] != D:
        wrong(f"head_dim of q is {D}, of k {shapes['k'][3]}", "make them equal")
    heads, k_len = shapes["k"][1:3]
    if Hq % max(heads, 1) or (Hq and not heads):
        wrong(f"{Hq} query heads on {heads} kv heads", "pass a multiple")
    if sinks is not None and sinks.shape != (Hq,):
        wrong(f"sinks have shape {sinks.shape}", f"pass ({Hq},)")
    if isinstance(mask, str):
        if mask != "causal":
            wrong(f"mask {mask!r}", 'pass None, "causal" or an array')
    elif mask is not None:
        if not isinstance(mask, mx.array):
            raise TypeError(
                f"attention: mask is a {type(mask).__name__}; pass an mx.array"
            )
        if not mask_fits(mask.shape, (B, Hq, q_len, k_len)):
            wrong(
                f"mask has shape {mask.shape}",
                f"pass one that broadcasts to {(B, Hq, q_len, k_len)}",
            )


def mask_fits(shape: tuple[int, ...], scores: tuple[int, ...]) -> bool:
    """Whether a mask's shape broadcasts to that of the scores."""
    if len(shape) > len(scores):
        return False
    for m, s in zip(reversed(shape), reversed(scores), strict=False):
        if m != 1 and m != s:
            return False
    return True


def _logical(name: str, a, group_size: int, bits: int, wrong) -> tuple[int, ...]:
    """[B, heads, length, head_dim] of a plain or packed cache."""
    if isinstance(a, mx.array):
        return a.shape
    words, scales, biases = a
    if group_size not in MODES["affine"][0] or bits not in MODES["affine"][1]:
        wrong(f"{bits} bits with groups of {group_size}", "pass what made the cache")
    if words.dtype != mx.uint32:
        wrong(f"words of {name} are {words.dtype}", "pass what mx.quantize gives")
    D = words.shape[-1] * 32 // bits
    want = (*words.shape[:-1], D // group_size)
    if scales.shape != want or biases.shape != want or D % group_size:
        wrong(
            f"words of {name} are {words.shape}, scales {scales.shape}, biases "
            f"{biases.shape}",
            f"with {bits} bits in groups of {group_size} the latter must be {want}",
        )
    return (*words.shape[:-1], D)
