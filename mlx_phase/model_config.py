"""The config of a model without its weights: enough for shapes and plans."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from . import gguf, gguf_llama, presets
from .model_error import ModelError
from .models import SMOLLM2, read_json, smollm2_path

# The base of every error of the HTTP client that this huggingface_hub uses.
_HTTP_ERROR = HfHubHTTPError.__mro__[1]
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_GGUF_DTYPES = {"F32": "float32", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Config:
    """A config dict, the spec it came from, and where that was found."""

    name: str
    config: dict[str, Any]
    source: str


def config_of(spec: str) -> Config:
    """The config of `spec`, as `mlx_phase.models.load` reads specs, loading nothing.

    Also takes the path of a `config.json`. Of a hub id it reads the config in the
    local cache, and downloads that one file where it is not there. Raises ModelError.
    """
    if spec == SMOLLM2:
        return _gguf(spec, smollm2_path())
    if spec.partition(":")[0] in presets.PRESETS:
        name, options = presets.parse(spec)
        found = {**presets.model_config(name, options), "dtype": options.dtype}
        return Config(spec, found, "synthetic preset")
    path = Path(spec).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f"{path}: no such file")
        return _gguf(spec, path)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ModelError(f"{path.parent}: no config.json, so not a model folder")
    if path.is_file():
        return Config(spec, read_json(path), f"file {path}")
    if _HUB_ID.fullmatch(spec):
        return Config(spec, read_json(_cached(spec)), f"hub {spec}")
    raise ModelError(
        f"{spec!r}: no such folder or file. Possible: {SMOLLM2}, "
        f"{', '.join(presets.PRESETS)}; a .gguf file; a config.json or its folder; a "
        "hub id (owner/name)"
    )


def _gguf(spec: str, path: Path) -> Config:
    file = gguf.read(path)
    config = gguf_llama.config(file)
    table = file.tensors["token_embd.weight"].type
    # As gguf_llama.build: float16 activations where anything is quantised.
    plain = "quantization" not in config
    dtype = _GGUF_DTYPES.get(table, "float16") if plain else "float16"
    return Config(spec, {**config, "dtype": dtype}, f"GGUF {path.name}")


def _cached(repo: str) -> Path:
    try:
        found = try_to_load_from_cache(repo, "config.json")
        if not isinstance(found, str):
            found = hf_hub_download(repo, "config.json")
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no model {repo!r}, or it needs a login (HF_TOKEN)"
        ) from error
    except HFValidationError as error:
        raise ModelError(f"{repo!r} is no hub id (owner/name)") from error
    except EntryNotFoundError as error:
        if isinstance(error, LocalEntryNotFoundError):
            raise ModelError(_offline(repo)) from error
        raise ModelError(f"{repo!r} has no config.json on the hub") from error
    except (OfflineModeIsEnabled, _HTTP_ERROR) as error:
        raise ModelError(_offline(repo)) from error
    return Path(found)


def _offline(repo: str) -> str:
    return (
        f"{repo}: no such folder; its config is not in the hub's local cache either, "
        "and the hub cannot be reached. Pass a folder, a config.json or a preset"
    )
