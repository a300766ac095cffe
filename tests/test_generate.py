"""One generation of the bench: arrival times, bytes read, equal tokens, prompts."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from bench_models import (
    LAYERS,
    VOCAB,
    ChatTokenizer,
    Tokenizer,
    config,
    run_of,
    tiny,
)
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache
from mlx_lm.models.switch_layers import SwitchLinear

from mlx_phase.bench import BenchError, prompts
from mlx_phase.bench import generate as gen

# --- one generation ---


def test_speeds_come_from_arrival_times():
    run = run_of([0.5, 0.6, 0.8, 0.9])
    assert run.ttft == 0.5
    assert run.step == pytest.approx(0.4 / 3)  # (t_last - t_first) / (tokens - 1)
    assert run.latency(50) == pytest.approx(0.1)
    assert run.latency(100) == pytest.approx(0.2)


def test_each_arrival_is_stamped_when_the_token_comes():
    now = [10.0]

    def steps(ids, model, max_tokens, prompt_cache):
        for i in range(max_tokens):
            now[0] += 0.5 if i == 0 else 0.1
            yield i, mx.zeros(3)

    run = gen.generate(tiny(), [1, 2, 3], 4, clock=lambda: now[0], steps=steps)
    assert run.arrivals == pytest.approx([0.5, 0.6, 0.7, 0.8])
    assert run.tokens == [0, 1, 2, 3] and run.prompt_tokens == 3


def test_generate_is_greedy_decoding_and_counts_the_cache():
    model, prompt = tiny(), [5, 9, 1]
    run = gen.generate(model, prompt, 4, keep_logprobs=True)
    ids = list(prompt)
    for token, logprobs in zip(run.tokens, run.logprobs, strict=True):
        logits = model(mx.array([ids]))[0, -1]
        assert token == mx.argmax(logits).item() == mx.argmax(logprobs).item()
        ids.append(token)
    # K and V of one kv head of 32, float32, at the mean length of prompt + 2.
    assert run.kv_bytes == LAYERS * 2 * 32 * 4 * (3 + 2)
    assert run.peak_bytes > 0
    assert run.arrivals == sorted(run.arrivals)


def test_an_unfilled_cache_reads_nothing():
    class Unfilled(KVCache):  # as in mlx-lm 0.31, the last for Python 3.10
        @property
        def state(self):
            return self.keys.shape, self.values

    full = KVCache()
    full.update_and_fetch(mx.zeros((1, 1, 4, 8)), mx.zeros((1, 1, 4, 8)))
    nested = CacheList(Unfilled(), RotatingKVCache(8))
    one = gen._mean_kv_bytes([full], 2)
    assert one > 0 and gen._mean_kv_bytes([Unfilled(), full, nested], 2) == one


# --- bytes per token ---


def size(module):
    return sum(a.nbytes for _, a in tree_flatten(module.parameters()))


@pytest.mark.parametrize("quantised", [True, False])
def test_a_tied_head_is_read_and_an_input_embedding_is_not(quantised):
    tied = tiny(tied=True, quantised=quantised)
    assert gen.decode_weight_bytes(tied, config()) == size(tied)
    free = tiny(tied=False, quantised=quantised)
    table = size(free.model.embed_tokens)
    expected = size(free) - table + table // VOCAB
    assert gen.decode_weight_bytes(free, config()) == expected


def test_only_the_routed_experts_are_read():
    class Moe(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = SwitchLinear(64, 32, num_experts=8, bias=False)
            self.lm_head = nn.Linear(32, 10, bias=False)

    model = Moe()
    got = gen.decode_weight_bytes(model, {"num_experts_per_tok": 2})
    assert got == 64 * 32 * 4 * 2 + 32 * 10 * 4
    with pytest.raises(BenchError, match="num_experts_per_tok"):
        gen.decode_weight_bytes(model, {})


def test_the_format_is_that_of_most_bytes():
    assert gen.weight_format(tiny()) == {"bits": 4, "group": 32, "mode": "affine"}
    plain = gen.weight_format(tiny(quantised=False))
    assert plain == {"bits": 32, "group": 0, "mode": "none"}
    model = tiny()
    layer = model.model.layers[0].mlp
    layer.up_proj = nn.QuantizedLinear(64, 128, bias=False, group_size=64, bits=8)
    assert gen.weight_format(model)["bits"] == 4  # mixed: one layer of 14


# --- equal tokens ---


def with_logits(tokens, rows, dtype=mx.bfloat16):
    run = run_of([0.1 * (i + 1) for i in range(len(tokens))], tokens)
    run.logprobs = [mx.array(row, dtype=dtype) for row in rows]
    return run


def test_equal_tokens_say_yes():
    assert gen.compare(run_of([1, 2], [4, 5]), run_of([3, 4], [4, 5])).text == "yes"


def test_a_near_tie_is_shown_but_no_failure():
    stock = with_logits([2, 0], [[-9, -8, 0], [-1.0, -1.03125, -20]])
    ours = with_logits([2, 1], [[-9, -8, 0], [-1.03125, -1.0, -20]])
    got = gen.compare(stock, ours)
    assert got.failure is None
    assert "token 2: stock 0, patched 1" in got.text and "near tie" in got.text
    assert "0.0312" in got.text
    # The same gap is an error in float32.
    stock = with_logits([2, 0], [[-9, -8, 0], [-1.0, -1.03125, -20]], mx.float32)
    assert gen.compare(stock, ours).failure


def test_another_token_with_a_wide_gap_fails():
    stock = with_logits([0], [[-0.1, -9.0]])
    ours = with_logits([1], [[-9.0, -0.1]])
    got = gen.compare(stock, ours)
    assert got.failure.startswith("tokens differ at token 1")


def test_host_cost_of_a_step_is_split_in_build_and_evaluate():
    build, evaluate = gen.host_step(tiny(), [1, 2, 3], 4)
    assert len(build) == len(evaluate) == 4
    assert min(build) > 0 and min(evaluate) > 0


# --- prompts ---


def test_prompts_use_the_chat_template_unless_raw():
    assert prompts.encode(ChatTokenizer(), "AB")[0] == 7
    assert prompts.encode(ChatTokenizer(), "AB", raw=True) == Tokenizer().encode("AB")
    assert prompts.encode(Tokenizer(), "AB") == Tokenizer().encode("AB")
    with pytest.raises(BenchError, match="--prompt-tokens instead of --prompt"):
        prompts.encode(None, "AB")


def test_text_stops_at_the_end_token():
    assert prompts.text_of(Tokenizer(), [1, 2, 0, 3]) == "AB"
    assert prompts.text_of(Tokenizer(), [1, 2]) == "AB"


def test_random_prompts_repeat_with_the_seed():
    one = prompts.random_ids(config(), 50, seed=1)
    assert one == prompts.random_ids(config(), 50, seed=1)
    assert one != prompts.random_ids(config(), 50, seed=2)
    assert all(0 <= i < VOCAB for i in one)
    with pytest.raises(BenchError, match="vocab_size"):
        prompts.random_ids({}, 5, seed=0)
