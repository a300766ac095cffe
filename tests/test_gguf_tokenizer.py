"""Tokenizers from GGUF metadata: splits, special tokens, round trips."""

import gguf_models
import gguf_writer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_phase import gguf, gguf_tokenizer
from mlx_phase.model_error import ModelError

TRICKY = [
    "",
    " leading and trailing ",
    "a  b\t\tc\n\n d",
    "1234567 12 3",
    "naïve ☃ 日本語 🙂 e\u0301",
    "don't WON'T",
    " ,.! ?",
    "\x00\x01\x7f\u00ad",
]
MODEL = gguf_models.model()


def tokenizer(tmp_path, pre="smollm", rows=288, **more):
    metadata = gguf_models.metadata(MODEL, pre, **more)
    path = gguf_writer.write(tmp_path / "t.gguf", metadata, {})
    return gguf_tokenizer.build(gguf.read(path), rows)


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    return tokenizer(tmp_path_factory.mktemp("tokenizer"))


# Merges join 1234 and the space before "hi" wherever the split leaves them together.
@pytest.mark.parametrize(
    "pre, text, pieces",
    [
        ("smollm", "1234 hi", ["1", "2", "3", "4", "Ġhi"]),
        ("qwen2", "1234 hi", ["1", "2", "3", "4", "Ġhi"]),
        ("gpt-2", "1234 hi", ["1234", "Ġhi"]),
        ("default", "1234", ["1234"]),
        ("llama-bpe", "1234 hi", ["123", "4", "Ġhi"]),
        # Llama 3 keeps one leading symbol with a word, GPT-2 only a space.
        ("llama-bpe", "-hi", ["-", "hi"]),
        ("gpt-2", "  hi", ["Ġ", "Ġhi"]),
    ],
)
def test_pre_split(tmp_path, pre, text, pieces):
    made = tokenizer(tmp_path, pre)
    ids = made.encode(text, add_special_tokens=False)
    assert made.convert_ids_to_tokens(ids) == pieces


def test_bos_follows_metadata_and_kind(tmp_path):
    assert tokenizer(tmp_path).encode("hi")[0] != 0
    llama3 = tokenizer(tmp_path, "llama-bpe")
    assert llama3.encode("hi")[0] == 0
    assert llama3.encode("hi", add_special_tokens=False)[0] != 0
    off = tokenizer(tmp_path, "llama-bpe", tokenizer__ggml__add_bos_token=False)
    assert off.encode("hi")[0] != 0
    eos = tokenizer(tmp_path, tokenizer__ggml__add_eos_token=True)
    assert eos.encode("hi")[-1] == 1


def test_control_tokens_are_single_ids(smollm):
    ids = smollm.encode("hi<|end|>hi")
    assert smollm.convert_ids_to_tokens(ids) == ["hi", "<|end|>", "hi"]
    assert smollm.decode(ids, skip_special_tokens=True) == "hihi"
    assert smollm.eos_token_ids == {1} and smollm.bos_token_id == 0


def test_chat_template_from_metadata(smollm):
    turn = [{"role": "user", "content": "hi"}]
    assert smollm.apply_chat_template(turn, tokenize=False) == "<|bos|>hi"
    assert smollm.apply_chat_template(turn)[0] == 0


def test_end_of_turn_ends_generation(tmp_path):
    tokens = ["<|eot_id|>", *gguf_models.metadata(MODEL)["tokenizer.ggml.tokens"][1:]]
    made = tokenizer(tmp_path, tokenizer__ggml__tokens=tokens)
    assert made.eos_token_ids == {0, 1}


@pytest.mark.parametrize("text", TRICKY)
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "gpt-2"])
def test_round_trip(tmp_path, pre, text):
    made = tokenizer(tmp_path, pre)
    assert made.decode(made.encode(text, add_special_tokens=False)) == text


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip_of_any_text(smollm, text):
    assert smollm.decode(smollm.encode(text)) == text


def test_streaming_equals_decoding(smollm):
    text = "hi 1234 日本語 🙂 end"
    detokenizer = smollm.detokenizer
    for token in smollm.encode(text):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == text


@pytest.mark.parametrize(
    "message, more",
    [
        ("a token appears twice", {"tokenizer__ggml__tokens": ["a", "a"]}),
        ("263 tokens|token types", {"tokenizer__ggml__token_type": [1, 1]}),
        ("not strings", {"tokenizer__ggml__merges": [1, 2]}),
        ("expected list", {"tokenizer__ggml__tokens": "abc"}),
        ("only 9 embedding rows", {"rows": 9}),
    ],
)
def test_inconsistent_metadata(tmp_path, message, more):
    with pytest.raises(ModelError, match=message):
        tokenizer(tmp_path, **more)
