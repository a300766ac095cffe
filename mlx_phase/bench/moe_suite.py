"""Experts of MoE blocks against stock MLX: a whole SwitchGLU, interleaved, cold."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU
from rich.table import Table

from ..patch import patch
from ..problem import Matmul
from ..roofline import weight_bytes
from ..routes import counted
from ..switch_layers import PROJECTIONS
from . import BenchError, gpu_time, record
from .device import Environment
from .kernel_data import TOLERANCE, weights
from .kernel_timer import Effort, Op, Timer
from .measure import Clock
from .suite import Case, cell, measure, table_of, trust

# Choices of experts that launches take in turn.
CHOICES = 16
CHECKED = 3  # tokens that are compared


@dataclass(frozen=True)
class Block:
    """Experts of one layer and how many tokens come; ``gate_up`` [experts, N, K]."""

    model: str
    gate_up: Matmul
    experts: int
    top_k: int
    tokens: int
    oai: bool = False  # gpt-oss: biases, and its activation

    @property
    def down(self) -> Matmul:
        """The way back: N and K change places."""
        return replace(self.gate_up, N=self.gate_up.K, K=self.gate_up.N)


def blocks(tokens: int, dtype: str = "bfloat16") -> list[Block]:
    """Layers of models that people run, for a number of tokens."""
    affine, mx4 = (dtype, 4, 64), (dtype, 4, 32, "mxfp4")
    return [
        Block("qwen3-30b-a3b", Matmul(1, 768, 2048, *affine), 128, 8, tokens),
        Block("gpt-oss-20b", Matmul(1, 2880, 2880, *mx4), 32, 4, tokens, oai=True),
        Block("mixtral-8x7b", Matmul(1, 14336, 4096, *affine), 8, 2, tokens),
    ]


def default_cases(quick: bool) -> Iterator[Block]:
    """The cases of the suite, most important first."""
    for tokens in (1, 16, 512) if quick else (1, 512, 4, 16, 64, 2048):
        yield from blocks(tokens)[: 2 if quick else 3]


def chosen(tokens: list[int] | None, quick: bool, env: Environment) -> list[Block]:
    """The default cases, or all blocks with these tokens. BenchError in emulation."""
    if env.executor == "cpu":
        raise BenchError("experts of real size take hours in emulation: run on a GPU")
    return [b for n in tokens for b in blocks(n)] if tokens else [*default_cases(quick)]


def _layer(b: Block, p: Matmul) -> nn.Module:
    form = (p.group_size, p.bits, p.mode)
    layer = QuantizedSwitchLinear(4 * p.group_size, 8, 1, False, *form)
    arrays = weights(replace(p, N=b.experts * p.N))
    for name, a in zip(("weight", "scales", "biases"), arrays, strict=False):
        layer[name] = a.reshape(b.experts, p.N, -1)
    if b.oai:
        c = mx.random.normal((b.experts, p.N))
        layer["bias"] = c.astype(getattr(mx, p.x_dtype))
    return layer


def _glu(b: Block, layers: list[nn.Module]) -> SwitchGLU:
    glu = SwitchGLU(32, 8, 1, activation=SwigluOAI() if b.oai else SwiGLU())
    for name, layer in zip(PROJECTIONS, layers, strict=True):
        glu[name] = copy.copy(layer)
    return glu.eval()


def choice(b: Block, seed: int) -> mx.array:
    """Experts of each token [1, tokens, top_k], as a router without habits gives."""
    scores = mx.random.normal((1, b.tokens, b.experts), key=mx.random.key(seed))
    return mx.contiguous(mx.argpartition(-scores, b.top_k - 1, axis=-1)[..., : b.top_k])


def measure_case(
    b: Block,
    env: Environment,
    effort: Effort,
    *,
    gpu_events: gpu_time.Recorder | None = gpu_time.cuda_events,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """One row: the experts of a patched model against those of mlx-lm.

    ``gpu_events`` as `suite.measure`.
    """
    layers = [_layer(b, p) for p in (b.gate_up, b.gate_up, b.down)]
    ours, stock = _glu(b, layers), _glu(b, layers)
    patch(ours, attention=False, steps=False, check=False)
    x = mx.random.normal((1, b.tokens, b.gate_up.K)).astype(
        getattr(mx, b.gate_up.x_dtype)
    )
    picks = [(choice(b, i),) for i in range(CHOICES)]
    # A model weighs and adds the experts; the mean keeps the size of x.
    timer = Timer({"A": ours, "B": stock}, x, picks, lambda y: y.mean(axis=-2))
    each = 2 * weight_bytes(b.gate_up) + weight_bytes(b.down)
    used = math.ceil(b.experts * (1 - (1 - b.top_k / b.experts) ** b.tokens))
    error = TOLERANCE[b.gate_up.x_dtype]
    case = Case(
        describe(b), each * b.experts, each * used, _errors(b, timer, layers), error
    )
    with counted() as routes:
        ours(x, *picks[0])
    # They come in the order they were made: gate with up is the first of a block.
    routes.sort(key=lambda r: "glu" not in r.name)
    found = measure(case, timer, env, effort, gpu_events, clock)["A"]
    names = [r.name if r.launch is not None else f"stock: {r.reason}" for r in routes]
    p = b.gate_up
    return record.row(
        suite="moe",
        kernel=" + ".join(n.split()[0] if "stock" not in n else n for n in names),
        shape=f"{p.K}x{p.N}",
        experts=f"{b.experts}/{b.top_k}",
        M=b.tokens,
        dtype=p.x_dtype,
        bits=p.bits,
        group=p.group_size,
        mode=p.mode,
        plan="; ".join(names),
        **found,
    )


def _errors(b: Block, timer: Timer, layers: list[nn.Module]) -> Callable[[Op], float]:
    """Error of an op on the first tokens, over the largest right value."""
    (indices,) = timer.buffers[0]
    count = min(CHECKED, b.tokens)
    act = SwigluOAI() if b.oai else SwiGLU()
    rows = []
    for t in range(count):
        x = timer.x[0, t].astype(mx.float32)
        for e in indices[0, t].tolist():
            gate, up = (_product(layer, e, x) for layer in layers[:2])
            rows.append(_product(layers[2], e, act(up, gate)))
    right = mx.stack(rows).reshape(count, b.top_k, -1)
    mx.eval(right)

    def error(op: Op) -> float:
        y = op(timer.x, indices)[0, :count].astype(mx.float32)
        off = mx.abs(y - right).max().item()
        return off / mx.abs(right).max().item() if math.isfinite(off) else math.inf

    return error


def _product(layer: nn.Module, e: int, x: mx.array) -> mx.array:
    form = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    parts = [layer[n][e] for n in ("weight", "scales", "biases") if n in layer]
    if layer.mode == "affine":
        parts[1:] = [a.astype(mx.float32) for a in parts[1:]]
        w = mx.dequantize(*parts, **form)
    else:
        w = mx.dequantize(*parts, **form, dtype=mx.float32)
    # Not a matmul: on CUDA that may run in tf32.
    y = (w * x).sum(axis=-1)
    return y + layer["bias"][e].astype(mx.float32) if "bias" in layer else y


def describe(b: Block) -> str:
    """A case in a few words, for messages."""
    p = b.gate_up
    return (
        f"{b.model} {p.mode} {p.bits}-bit {p.x_dtype} {p.K}x{p.N}, {b.top_k} of "
        f"{b.experts} experts, {b.tokens} tokens"
    )


def table(rows: list[dict[str, Any]]) -> Table:
    """Rows as a table for the terminal."""
    names = ("K x N", "experts", "tokens", "format", "dtype", "us", "stock", "ratio")
    more = ("GB/s", "wall", "stock wall", "spread", "kernels", "")
    out = table_of("µs for the experts of a block, median", (*names, *more))
    for r in rows:
        out.add_row(
            *(r["shape"], r["experts"], str(r["M"])),
            f"{r['mode']} {r['bits']}b g{r['group']}",
            r["dtype"],
            *(cell(r[name]) for name in ("us", "stock_us")),
            cell(r["ratio"], "{:.2f}"),
            cell(r["gbps"], "{:.0f}"),
            *(cell(r[n]) for n in ("wall_us", "stock_wall_us")),
            cell(r["spread"], "{:.1%}"),
            r["kernel"],
            trust(r),
        )
    return out
