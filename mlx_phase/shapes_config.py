"""What a config.json means: which structure, which key, which quantisation."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .model_error import ModelError
from .problem import AFFINE_BITS, DTYPE_BYTES, FP_MODES


@dataclass(frozen=True)
class Format:
    """How a matrix is stored; ``mode`` none is plain, of the model's dtype."""

    bits: int
    group_size: int
    mode: str

    def __str__(self) -> str:
        if self.mode == "none":
            return "plain"
        return f"{self.mode} {self.bits}-bit g{self.group_size}"


@dataclass(frozen=True)
class Kind:
    """How a family of models deviates from llama.

    ``mlp`` is gated (gate, up, down), fused (gate_up, down) or plain (up, down);
    ``tied`` of None asks the config. ``experts`` and ``active`` are the config keys of
    the number of experts and of those that a token uses; ``block``, ``router`` and
    ``expert_path`` are mlx-lm's module names, which per-layer quantisation uses.
    ``slides``: mlx-lm applies the sliding window; ``pattern``: each so-many-th layer
    is a full one where layer_types does not say. ``shared``: an expert that every
    token uses; ``some_dense``: layers may keep a dense MLP.
    """

    mlp: str = "gated"
    fused_qkv: bool = False
    tied: bool | None = None
    untied_by_default: bool = False
    head_dim: int | None = None
    slides: bool = False
    pattern: int = 0
    window: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    experts: str = ""
    active: str = "num_experts_per_tok"
    block: str = "mlp"
    router: str = "gate"
    expert_path: str = "switch_mlp"
    shared: bool = False
    some_dense: bool = False


_LLAMA, _SLIDING = Kind(), Kind(slides=True)
_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
}
# model_type -> structure. Each row is tested against the modules mlx-lm builds.
KINDS: dict[str, Kind] = {
    "llama": _SLIDING,
    "mistral": _SLIDING,
    "ministral3": _SLIDING,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "seed_oss": _LLAMA,
    "internlm3": Kind(untied_by_default=True),
    "olmo2": _LLAMA,
    "olmo3": Kind(slides=True, pattern=4, untied_by_default=True),
    "gemma": Kind(tied=True),
    "gemma2": Kind(tied=True),
    "gemma3_text": Kind(slides=True, pattern=6, window=512, defaults=_GEMMA3),
    "phi3": Kind(mlp="fused", fused_qkv=True, untied_by_default=True),
    "glm4": Kind(mlp="fused", tied=False),
    "starcoder2": Kind(mlp="plain", names={"up_proj": "c_fc", "down_proj": "c_proj"}),
    "nemotron": Kind(mlp="plain", untied_by_default=True),
    "mixtral": Kind(
        experts="num_local_experts", block="block_sparse_moe", untied_by_default=True
    ),
    "qwen2_moe": Kind(experts="num_experts", tied=False, shared=True),
    "qwen3_moe": Kind(experts="num_experts", some_dense=True),
    "olmoe": Kind(experts="num_experts"),
    "granitemoe": Kind(
        experts="num_local_experts", block="block_sparse_moe", router="router.layer"
    ),
    "gpt_oss": Kind(
        experts="num_local_experts", router="router", expert_path="experts",
        head_dim=64, slides=True, pattern=2, window=128, tied=False,
    ),
}  # fmt: skip
_ALIASES = {"gemma3": "gemma3_text", "mistral3": "llama", "iquestcoder": "llama"}
# Keys of structures that KINDS does not describe, whatever the model_type says.
_FOREIGN = ("kv_lora_rank", "ssm_state_size", "mamba_d_state", "linear_num_value_heads")
_DTYPES = {f"torch.{name}": name for name in DTYPE_BYTES}
_PLAIN = Format(16, 0, "none")


def read(config: Mapping[str, Any]) -> tuple[dict[str, Any], Kind, list[str]]:
    """(the language model's own config, its structure, notes for the reader)."""
    if not isinstance(config, Mapping) or "model_type" not in config:
        raise ModelError("not a model's config: it has no 'model_type'")
    text = config.get("text_config")
    outer = str(config["model_type"])
    c = {**config, **text} if isinstance(text, Mapping) else dict(config)
    name = str(c.get("model_type", outer))
    if name not in KINDS:
        name = _ALIASES.get(name, _ALIASES.get(outer, name))
    foreign = [key for key in _FOREIGN if c.get(key)]
    if name not in KINDS or foreign:
        near = difflib.get_close_matches(name, KINDS, n=2)
        guess = f" Did you mean {' or '.join(near)}?" if near and not foreign else ""
        found = f" (it has {foreign[0]})" if foreign else ""
        raise ModelError(
            f"model_type {name!r}{found} has a structure that is not described yet."
            f"{guess} Known: {', '.join(KINDS)}"
        )
    kind = KINDS[name]
    c = {**kind.defaults, **c, "model_type": name}
    notes = []
    if isinstance(text, Mapping):
        notes.append(f"{outer}: the language model alone, without its other parts")
        if outer == "mistral3":
            # mlx-lm's own default for this wrapper.
            c["tie_word_embeddings"] = text.get("tie_word_embeddings", False)
    return c, kind, notes


def is_tied(c: Mapping[str, Any], kind: Kind) -> bool:
    """Whether the head is the embedding table."""
    if kind.tied is not None:
        return kind.tied
    return bool(c.get("tie_word_embeddings", not kind.untied_by_default))


def whole(c: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A non-negative whole number of the config; 0 only as the default."""
    value = c.get(key)
    if value is None:
        if default is None:
            raise ModelError(f"config has no {key!r}")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelError(f"config: {key} must be a whole number, not {value!r}")
    if value == 0 and default is None:
        raise ModelError(f"config: {key} must not be 0")
    return value


def dtype_of(config: Mapping[str, Any], c: Mapping[str, Any], notes: list[str]) -> str:
    """Activations' dtype; bfloat16, with a note, where the config is silent."""
    given = next(
        (d[k] for d in (config, c) for k in ("dtype", "torch_dtype") if d.get(k)), None
    )
    if given is None:
        notes.append("dtype is not in the config: bfloat16 assumed")
        return "bfloat16"
    name = _DTYPES.get(str(given), str(given))
    if name not in DTYPE_BYTES:
        raise ModelError(
            f"config: dtype {given!r} is not one of {', '.join(DTYPE_BYTES)}"
        )
    return name


def formats(config: Mapping[str, Any]) -> Callable[[str, int], Format]:
    """(module path, K) -> format, as mlx-lm quantises it.

    A path that the config names has its own format or none (False). A K that its
    group does not divide stays plain, as in mlx_lm.convert.
    """
    q = _quantization(config)
    if q is None:
        return lambda path, K: _PLAIN
    usual = _format(q, "quantization")
    packed = q.get("packed", "")
    named = {
        path.removeprefix("language_model."): _format(v, path) if v else _PLAIN
        for path, v in q.items()
        if isinstance(v, Mapping) or v is False
    }

    def of(path: str, K: int) -> Format:
        found = named.get(path, usual if packed in path else _PLAIN)
        return _PLAIN if found.group_size and K % found.group_size else found

    return of


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    text = config.get("text_config")
    for c in (config, text if isinstance(text, Mapping) else {}):
        if q := c.get("quantization"):
            return q
        if q := c.get("quantization_config"):
            return q if "group_size" in q and "quant_method" not in q else _foreign(q)
    return None


def _foreign(q: Mapping[str, Any]) -> Mapping[str, Any]:
    """Formats of other tools that mlx-lm loads without a new quantisation."""
    method = q.get("quant_method")
    if method in ("mxfp4", "mxfp8"):
        bits, group = FP_MODES[method]
        # gpt-oss: the checkpoint packs the experts and nothing else.
        return {"bits": bits, "group_size": group, "mode": method, "packed": "experts"}
    if method in ("awq", "gptq") and q.get("bits", 4) == 4:
        return {"bits": 4, "group_size": q.get("group_size", 128), "packed": "proj"}
    raise ModelError(
        f"quantization_config of method {method!r} is not known to the report; use the "
        "config of an MLX conversion"
    )


def _format(q: Mapping[str, Any], where: str) -> Format:
    mode = q.get("mode", "affine")
    bits, group = q.get("bits"), q.get("group_size")
    if mode in FP_MODES:
        bits, group = bits or FP_MODES[mode][0], group or FP_MODES[mode][1]
    elif mode != "affine":
        raise ModelError(f"{where}: quantisation mode {mode!r} is not known")
    if not isinstance(group, int) or group < 1 or bits not in AFFINE_BITS:
        raise ModelError(f"{where}: quantised with bits={bits}, group_size={group}")
    return Format(bits, group, mode)
