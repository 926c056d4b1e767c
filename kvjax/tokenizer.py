"""Text to token ids and back, chat templates, and text that appears while tokens do."""

from __future__ import annotations

import codecs
import functools
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

from kvjax import chat_template, gguf_tokenizer
from kvjax.checkpoints.source import TensorSource, one_line, read_json
from kvjax.errors import ModelError, RequestError

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_LAST_ID = 2**31 - 1


class Tokenizer:
    """A checkpoint's tokenizer. Never changes once made.

    Attributes:
      vocab_size: number of tokens, added ones included; the model's vocabulary may be padded beyond it.
      bos_id: the token that begins a text, or None.
      eos_ids: the tokens that end a text or a turn; may be empty. Ids that the tokenizer has no token for are left
        out, as files name -1 or an id of another model for none.
      chat_template: Jinja source, or None.
      strips_space: whether a text's first space, which SentencePiece puts there itself, is not part of it.
    """

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str | None
    strips_space: bool

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        fields: Mapping[str, Any] | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ):
        """Wraps a tokenizer.

        Args:
          backend: what splits text.
          fields: those of tokenizer_config.json.
          config: those of config.json, for the ids that begin and end a text.
          generation_config: those of generation_config.json, likewise.

        Raises:
          ModelError: tokens are spelled in a way that is not supported.
        """
        fields, config, generation_config = fields or {}, config or {}, generation_config or {}
        self._backend = backend
        self._spelling, self.strips_space = _spelling(json.loads(backend.to_str()))
        self._added = backend.get_added_tokens_decoder()
        self._names = _special_names(fields)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = self._first_token(fields, config)
        named = backend.token_to_id(self._names.get("eos_token", ""))
        stops = [*_ids(generation_config), *_ids(config), *([] if named is None else [named])]
        self.eos_ids = tuple(dict.fromkeys(index for index in stops if self._has(index)))
        self.chat_template = _default_template(fields.get("chat_template"))

    @classmethod
    def from_source(cls, source: TensorSource) -> Tokenizer:
        """The tokenizer of a checkpoint. Raises ModelError if it has none, or one that is not supported."""
        backend, fields = tokenizer_parts(source)
        return cls(backend, fields, config=source.config, generation_config=source.generation_config)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with the first or last token that the checkpoint puts around one, if asked.

        Raises:
          RequestError: the text is not Unicode (it has half of a surrogate pair).
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"This text cannot be encoded ({one_line(error)}): give valid Unicode.") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens. Bytes that make no character appear as U+FFFD; unknown ids as nothing."""
        stream = StreamDecoder(self, skip_special_tokens)
        return "".join([stream.push(index) for index in ids]) + stream.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text: b"" for special tokens and ids beyond the vocabulary."""
        return self._bytes(token_id, True)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation, to be encoded with `add_special_tokens=False`.

        Args:
          messages: {"role": ..., "content": ...}, in order.
          add_generation_prompt: whether the text ends where the assistant's answer begins.
          **variables: more names for the template, e.g. tools, enable_thinking.

        Raises:
          RequestError: no template, messages of a wrong shape, or a template that refuses them.
        """
        if self.chat_template is None:
            raise RequestError("This checkpoint has no chat template: send a plain prompt instead of messages.")
        names = {**self._names, **variables, "add_generation_prompt": add_generation_prompt}
        return chat_template.render(self.chat_template, messages, **names)

    def _first_token(self, fields: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
        if "bos_token" in fields:
            return self._backend.token_to_id(self._names.get("bos_token", ""))
        return next((index for index in _ids(config, "bos_token_id") if self._has(index)), None)

    def _has(self, index: int) -> bool:
        return self._backend.id_to_token(index) is not None

    def _bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return b"" if added.special and skip_special_tokens else added.content.encode()
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._spelling(token)


class StreamDecoder:
    """Turns tokens into text one by one; the joined pieces equal `Tokenizer.decode` of all ids.

    A piece never ends inside a character: bytes wait until their character is whole, or cannot become one.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_space

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        return self._emit(self._utf8.decode(self._tokenizer._bytes(token_id, self._skip)))

    def finish(self) -> str:
        """What still waits: U+FFFD for bytes whose character never came to an end. Then starts afresh."""
        text = self._emit(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        self._strip = self._tokenizer.strips_space
        return text

    def _emit(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


def tokenizer_parts(source: TensorSource) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The `tokenizers` object of a checkpoint and the fields of its tokenizer_config.json. Raises ModelError."""
    where = source.tokenizer_source
    if where.metadata is not None:
        return gguf_tokenizer.build(where.metadata), gguf_tokenizer.config(where.metadata)
    if where.folder is None:
        raise ModelError(f"{source.describe()} comes without a tokenizer.")
    return _from_folder(where.folder)


def _from_folder(folder: epath.Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    import tokenizers

    file = folder / "tokenizer.json"
    if not file.exists():
        raise ModelError(
            f"{file} is missing: write it with transformers' AutoTokenizer.from_pretrained(..).save_pretrained(..)."
        )
    try:
        backend = tokenizers.Tokenizer.from_str(file.read_text())
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{file} cannot be read ({one_line(error)}): download or copy it again.") from error
    fields = read_json(folder / "tokenizer_config.json")
    template = folder / "chat_template.jinja"
    if template.exists():
        try:
            fields["chat_template"] = template.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{template} cannot be read ({one_line(error)}): download or copy it again.") from error
    elif "chat_template" not in fields:
        fields.update(read_json(folder / "chat_template.json"))
    return backend, fields


def _spelling(description: Mapping[str, Any]) -> tuple[Any, bool]:
    """How tokens spell bytes (token → bytes), and whether a text loses one leading space when decoded."""
    parts = _flatten(description.get("decoder"), "decoders")
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return _byte_level_bytes, False
    if not kinds & {"ByteFallback", "Metaspace"}:
        found = ", ".join(sorted(kinds)) or "none"
        raise ModelError(f"tokenizer.json has a decoder that is not supported ({found}): use a BPE tokenizer.")
    strips = any(part["type"] == "Strip" and part.get("start", 0) > 0 for part in parts)
    prefixed = any(part["type"] == "Metaspace" and part.get("prepend_scheme") != "never" for part in parts)
    return _sentence_piece_bytes, strips or prefixed


def _flatten(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [leaf for child in part[inner] for leaf in _flatten(child, inner)]
    return [part]


def _sentence_piece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _byte_level_bytes(token: str) -> bytes:
    table = _byte_table()
    try:
        return bytes([table[letter] for letter in token])
    except KeyError:  # not spelled in the alphabet of bytes: as the tokenizers library does, take it as it is
        return token.encode()


@functools.cache
def _byte_table() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 letters stand for themselves, the other 68 bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _special_names(fields: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and so on, each a text or {"content": text} in tokenizer_config.json."""
    values = {key: fields.get(key) for key in _TEMPLATE_TOKENS}
    plain = {key: value.get("content") if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in plain.items() if isinstance(value, str)}


def _ids(fields: Mapping[str, Any], key: str = "eos_token_id") -> list[int]:
    """The token ids in a field: one, or a list. What cannot be an id, as null or -1, is left out."""
    value = fields.get(key)
    values = value if isinstance(value, list) else [value]
    return [index for index in values if type(index) is int and 0 <= index <= _LAST_ID]


def _default_template(value: Any) -> str | None:
    """A template, or the one named "default" of a list of {"name", "template"}."""
    if isinstance(value, list):
        for entry in value:
            name = entry.get("name") if isinstance(entry, dict) else ""
            if not isinstance(name, str):
                reason = 'each needs a text for a name, the one to use "default"'
                raise ModelError(f"The tokenizer's chat_template has one named {reprlib.repr(name)}: {reason}.")
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
