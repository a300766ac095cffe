"""The tokenizer in a GGUF's metadata as an mlx-lm tokenizer."""

from __future__ import annotations

from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from .gguf import GGUF
from .model_error import ModelError

CONTROL, USER_DEFINED = 3, 4
# Tokens that end an answer although `eos_token_id` names another one.
_END_TOKENS = ("<|eot_id|>", "<|im_end|>")

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Pre-tokenizer kinds by what they do; 'default' is what old files say.
_GPT2 = ("gpt-2", "default", "mpt", "olmo", "jais")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2",)


def _split(kind: str, path: Any) -> pre_tokenizers.PreTokenizer:
    """The rule that cuts text into pieces before byte-pair merging."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if kind in _GPT2:
        return words
    if kind in _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, words])
    if kind in _LLAMA3 or kind in _QWEN2:
        regex = Regex(_WORDS % ("{1,3}" if kind in _LLAMA3 else ""))
        return pre_tokenizers.Sequence([pre_tokenizers.Split(regex, "isolated"), plain])
    known = ", ".join(_GPT2 + _DIGITS + _LLAMA3 + _QWEN2)
    raise ModelError(
        f"{path}: tokenizer pre-split {kind!r} is not supported (supported: {known})"
    )


def _vocabulary(gguf: GGUF) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens by id and merges by rank, each checked."""
    tokens = gguf.require("tokenizer.ggml.tokens", list)
    lines = gguf.require("tokenizer.ggml.merges", list)
    if not tokens or not all(isinstance(item, str) for item in tokens + lines):
        raise ModelError(f"{gguf.path}: tokenizer tokens or merges are not strings")
    known = set(tokens)
    if len(known) != len(tokens):
        raise ModelError(f"{gguf.path}: a token appears twice in the vocabulary")
    merges = []
    for rank, line in enumerate(lines):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= known:
            raise ModelError(
                f"{gguf.path}: merge {rank} ({line!r}) needs tokens that are not in "
                "the vocabulary"
            )
        merges.append((left, right))
    return tokens, merges


def build(gguf: GGUF, rows: int) -> TokenizerWrapper:
    """Byte-level BPE tokenizer of a GGUF for an embedding with `rows` rows.

    Raises ModelError for another tokenizer model, an unknown pre-split or an
    inconsistent vocabulary.
    """
    model = gguf.require("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise ModelError(
            f"{gguf.path}: tokenizer model {model!r} is not supported, only 'gpt2' "
            "(byte-level BPE); use an MLX conversion of the model"
        )
    tokens, merges = _vocabulary(gguf)
    if len(tokens) > rows:
        raise ModelError(
            f"{gguf.path}: {len(tokens)} tokens but only {rows} embedding rows"
        )
    kind = gguf.get("tokenizer.ggml.pre", str, "default")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    bpe = models.BPE(vocabulary, merges, ignore_merges=kind in _LLAMA3)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _split(kind, gguf.path)
    tokenizer.decoder = decoders.ByteLevel()

    types = gguf.get("tokenizer.ggml.token_type", list, [])
    if types and len(types) != len(tokens):
        raise ModelError(f"{gguf.path}: {len(types)} token types, {len(tokens)} tokens")
    control = [tokens[i] for i, kind_ in enumerate(types) if kind_ == CONTROL]
    user = [tokens[i] for i, kind_ in enumerate(types) if kind_ == USER_DEFINED]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in user])

    special = {
        f"{role}_token": _special(gguf, tokens, key)
        for role, key in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("unk", "unknown"),
            ("pad", "padding"),
        )
    }
    _add_ends(gguf, tokenizer, kind in _LLAMA3, special, vocabulary)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **{role: token for role, token in special.items() if token is not None},
    )
    fast.chat_template = gguf.get("tokenizer.chat_template", str)
    ends = {_special(gguf, tokens, "eos"), _special(gguf, tokens, "eot")}
    ends |= set(_END_TOKENS) & set(control)
    return TokenizerWrapper(
        fast,
        BPEStreamingDetokenizer,
        eos_token_ids=sorted(vocabulary[token] for token in ends if token is not None),
    )


def _special(gguf: GGUF, tokens: list[str], role: str) -> str | None:
    """The token that the metadata names for a role; None where it names none."""
    key = f"tokenizer.ggml.{role}_token_id"
    index = gguf.get(key, int)
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise ModelError(
            f"{gguf.path}: metadata {key!r} is {index}, not one of {len(tokens)} tokens"
        )
    return tokens[index]


def _add_ends(
    gguf: GGUF,
    tokenizer: Tokenizer,
    default_bos: bool,
    special: dict[str, str | None],
    vocabulary: dict[str, int],
) -> None:
    """Let encode() add bos and eos where the metadata says so."""
    pieces: list[str | None] = ["$A"]
    if gguf.get("tokenizer.ggml.add_bos_token", bool, default_bos):
        pieces.insert(0, special["bos_token"])
    if gguf.get("tokenizer.ggml.add_eos_token", bool, False):
        pieces.append(special["eos_token"])
    if None in pieces:
        raise ModelError(f"{gguf.path}: asks for a bos or eos token but names none")
    used = [(token, vocabulary[token]) for token in pieces if token != "$A"]
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not used:
        tokenizer.post_processor = byte_level
        return
    template = processors.TemplateProcessing(
        single=[_piece(token) for token in pieces], special_tokens=used
    )
    tokenizer.post_processor = processors.Sequence([byte_level, template])


def _piece(token: str) -> str:
    # A ':' in a token would read as a type id in the template's short syntax.
    return token if token == "$A" else f"{token}:0"
