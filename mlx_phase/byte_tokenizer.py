"""A tokenizer for models without one: ids 0..255 are the bytes of UTF-8 text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper


class ByteTokenizer:
    """The part of a Hugging Face tokenizer that mlx-lm uses.

    Ids of 256 and more, which only random weights produce, decode to `<id>`.
    There is no end token, so generation always reaches its token limit.
    """

    bos_token = eos_token = pad_token = unk_token = None
    bos_token_id = eos_token_id = pad_token_id = unk_token_id = None
    chat_template = None
    clean_up_tokenization_spaces = False

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.vocab_size

    def piece(self, token: int) -> bytes:
        """UTF-8 bytes of one id."""
        return bytes([token]) if token < 256 else f"<{token}>".encode()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of the text's UTF-8 bytes; there are no special tokens to add."""
        return list(text.encode("utf-8"))

    def decode(
        self, token_ids: int | Iterable[int], skip_special_tokens: bool = False
    ) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return b"".join(map(self.piece, ids)).decode("utf-8", "replace")

    def get_vocab(self) -> dict[str, int]:
        """Names of the byte ids."""
        return {f"<0x{byte:02X}>": byte for byte in range(256)}

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Id of a name from `get_vocab`."""
        return self.get_vocab().get(token)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """Names of ids."""
        return [f"<0x{i:02X}>" if i < 256 else f"<{i}>" for i in ids]

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **_: Any,
    ) -> list[int] | str:
        """`role: content` lines; a synthetic model has learnt no format."""
        lines = [f"{turn['role']}: {turn['content']}\n" for turn in conversation]
        text = "".join(lines) + ("assistant:" if add_generation_prompt else "")
        return self.encode(text) if tokenize else text


class ByteDetokenizer(StreamingDetokenizer):
    """Streams text of a `ByteTokenizer`, holding back unfinished characters."""

    def __init__(self, tokenizer: ByteTokenizer):
        super().__init__()
        self._piece = tokenizer.piece
        self.reset()

    def reset(self) -> None:
        """Start a new text."""
        self.offset = 0
        self.tokens: list[int] = []
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add_token(self, token: int) -> None:
        """Append one id."""
        self.tokens.append(token)
        self.text += self._decoder.decode(self._piece(token))

    def finalize(self) -> None:
        """Flush an unfinished character as U+FFFD."""
        self.text += self._decoder.decode(b"", final=True)


def byte_tokenizer(vocab_size: int) -> TokenizerWrapper:
    """A `ByteTokenizer` as mlx-lm's generate functions take it."""
    return TokenizerWrapper(ByteTokenizer(vocab_size), ByteDetokenizer)
