"""Analyses for the tests of the report."""

from mlx_phase.chip import lookup
from mlx_phase.model_config import config_of
from mlx_phase.report import Options, analyse, kernels
from mlx_phase.shapes import model_shapes

MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
    "dtype": "bfloat16", "quantization": {"group_size": 64, "bits": 4},
}  # fmt: skip


def analysis(model="llama-8b", chip="m4-max", **options):
    found = config_of(model) if isinstance(model, str) else None
    config = found.config if found else model
    shapes = model_shapes(config)
    return analyse("model", "test", shapes, lookup(chip), Options(**options))


def rows(a, phase, operation):
    table = kernels.table(a)
    return [
        r
        for r in table
        if r["phase"] == phase and r["operation"].split(" (")[0] == operation
    ]
