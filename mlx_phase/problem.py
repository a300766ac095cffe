"""What is to be computed: frozen facts, no choices, no mlx."""

from __future__ import annotations

from dataclasses import dataclass

# Bytes of a group's scale and bias, and the group sizes MLX knows (mlx 0.32.4).
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
FP_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Matmul:
    """``y[M, N] = x[M, K] @ W[N, K].T`` with W quantised in groups along K.

    ``mode`` is ``affine``, ``mxfp4``, ``nvfp4``, ``mxfp8`` or ``none`` (plain
    weights of ``x_dtype``; ``bits`` and ``group_size`` are then ignored).
    ``M`` counts all rows of x; ``batch`` counts independent weight matrices.
    """

    M: int
    N: int
    K: int
    x_dtype: str = "bfloat16"
    bits: int = 4
    group_size: int = 64
    mode: str = "affine"
    batch: int = 1


@dataclass(frozen=True)
class Attention:
    """Causal attention of the last ``q_len`` of ``k_len`` positions, one layer.

    Query i sees the positions up to its own, at most ``window`` of them (None: all).
    ``kv_bits`` of 16 or more is a plain cache of ``dtype``; below that, an affine
    cache with a scale and a bias for each ``kv_group`` elements. ``batch`` counts
    requests of this length, each with a cache of its own.
    """

    q_len: int
    k_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    batch: int = 1
    dtype: str = "bfloat16"
    kv_bits: int = 16
    kv_group: int = 64
    window: int | None = None


@dataclass(frozen=True)
class Gather:
    """``y[p] = x[row of p] @ W[expert of p].T`` for ``pairs`` of a row and an expert.

    ``matmul`` is what one expert computes for one row (M = 1), with W [experts, N, K].
    ``each``: pair p reads row ``p // each`` of x; 0: an array says which row. ``bias``:
    one of [experts, N] is added. ``activation``: ``""``, or two weights, gate and up,
    and ``y = act(gate) * up``: ``silu``, ``gelu_approx``, or ``clipped`` (gpt-oss) with
    ``alpha`` and ``limit``. ``sorted``: pairs come in the order of their experts.
    ``scattered``: an array says which row of y is that of a pair. ``exact``: a pair has
    the same bits for any few pairs (``plan_gather.MAX_PAIRS``).
    """

    matmul: Matmul
    experts: int
    pairs: int
    each: int = 1
    bias: bool = False
    activation: str = ""
    alpha: float = 0.0
    limit: float = 0.0
    sorted: bool = False
    scattered: bool = False
    exact: bool = True


# head_dim and v_head_dim of the decode-attention kernels; unequal pairs are MLA's.
HEAD_DIMS = (64, 72, 80, 96, 112, 128, 192, 256, 512)
HEAD_DIM_PAIRS = ((192, 128), (576, 512))
CACHE_BITS = (4, 8)
CACHE_GROUPS = (32, 64)


@dataclass(frozen=True)
class Sdpa:
    """Decode attention of ``q_len`` new rows over a cache, one layer.

    ``o[B, Hq, q_len, Dv]`` from q ``[B, Hq, q_len, D]``, k ``[B, Hkv, k_len, D]`` and v
    ``[B, Hkv, k_len, Dv]``. ``k_bits``, ``v_bits`` of 16 or more: a plain cache of
    ``dtype``; 8 or 4: affine codes with a scale and a bias of ``dtype`` for each
    ``k_group``, ``v_group`` elements. ``causal``: row i sees the keys up to its own,
    the last row all. ``window``: row i sees at most that many, up to its own (0: all).
    ``mask``: ``none``, ``bool`` or ``additive``. ``sinks``: one more score per head, in
    the denominator alone. ``lens``: keys of each batch row are counted on the device.
    ``joint``: k and v are one array ``[2 B, Hkv, k_len, D]``, k first (codes: three),
    and those of the last tokens lie beside it, counted on the device too.
    ``k_len`` is not part of any plan; 0 says any.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    q_len: int = 1
    batch: int = 1
    dtype: str = "bfloat16"
    k_bits: int = 16
    k_group: int = 64
    v_bits: int = 16
    v_group: int = 64
    causal: bool = False
    window: int = 0
    mask: str = "none"
    sinks: bool = False
    lens: bool = False
    joint: bool = False
    k_len: int = 0
