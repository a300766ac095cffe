"""A model's config without its weights, from each kind of spec."""

import json

import mlx.nn as nn
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from mlx_phase import model_config
from mlx_phase.model_config import config_of
from mlx_phase.model_error import ModelError
from mlx_phase.model_size import bytes_per_token
from mlx_phase.roofline import weight_bytes
from mlx_phase.shapes import matmuls, model_shapes

CONFIG = {"model_type": "llama", "hidden_size": 64}


def test_config_from_a_folder_a_file_and_the_hub_cache(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    # No weights beside it: the config alone is enough.
    assert config_of(str(tmp_path)).config == config_of(str(path)).config == CONFIG
    monkeypatch.setattr(
        model_config, "try_to_load_from_cache", lambda repo, name: str(path)
    )
    assert config_of("owner/name").config == CONFIG


def test_config_errors(tmp_path, monkeypatch):
    def offline(repo, name):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(model_config, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(model_config, "hf_hub_download", offline)
    (tmp_path / "bad.json").write_text("[1]")
    for spec, complaint in (
        ("owner/name", "the hub cannot be reached"),
        (str(tmp_path), "no config.json"),
        (str(tmp_path / "bad.json"), "not a JSON object"),
        (str(tmp_path / "x.gguf"), "no such file"),
    ):
        with pytest.raises(ModelError, match=complaint):
            config_of(spec)


def test_a_preset_gives_its_options():
    found = config_of("llama-1b:bits=8,group=32,dtype=float16")
    assert found.config["quantization"]["group_size"] == 32
    assert found.config["dtype"] == "float16"


def test_a_gguf_has_the_bytes_of_the_loaded_model(smollm2):
    found = config_of("smollm2")
    assert found.config["dtype"] == "float16" and found.source.startswith("GGUF")
    # The fixture runs on a CPU, where activations and scales are float32.
    shapes = model_shapes({**found.config, "dtype": "float32"})
    ours = sum(weight_bytes(p) * n for _, p, n in matmuls(shapes, 1))
    norms = (m for m in smollm2.model.modules() if isinstance(m, nn.RMSNorm))
    norm_bytes = sum(m.weight.nbytes for m in norms)
    assert ours + norm_bytes == bytes_per_token(smollm2.model)
