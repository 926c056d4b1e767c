"""Writes tests/goldens/tokenizer_smollm2.json: what other engines make of texts and chats with SmolLM2's tokenizer.

Needs transformers (and llama-cpp-python, where there): run it in an environment of its own.

    python scripts/make_tokenizer_goldens.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent.parent / "tests" / "goldens" / "tokenizer_smollm2.json"

TEXTS = [
    "",
    " ",
    "Hello",
    " Hello",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "I'm sure they've said we'll go; it's John's, isn't it? HE'S",
    "1234567890",
    "In 2024 there were 3.14159 pies, 42 cats and 1,000,000 dogs.",
    "½ ² Ⅷ ٣٤ ४५",
    "a  b   c    d     e",
    "    indented\n        twice\n\ttab",
    "line\nline\n\nparagraph\n\n\n\nend\n",
    "trailing spaces   ",
    "\n\n\n",
    "\t\t\t",
    "\r\nwindows\r\n",
    "def f(x):\n    return x ** 2 + 1  # square\n\nprint(f(3))",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * 0x1F; }",
    '{"key": [1, 2.5e-3, null, true], "nested": {"a": "b\\n"}}',
    '<div class="x">&amp; <b>bold</b></div>',
    "https://example.com/path?query=1&other=two#frag",
    "SELECT * FROM t WHERE a >= 10 AND b LIKE '%x%';",
    "naïve café Zürich señor Ångström",
    "naïve cafe\u0301 decomposed e\u0301",
    "Привет, мир! Как дела?",
    "你好,世界!今天天气怎么样?",
    "こんにちは世界 カタカナ",
    "안녕하세요 세계",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "😀 😃😄 🎉",
    "👨‍👩‍👧‍👦 family, 🇫🇷 flag, 👍🏽 tone",
    "math: ∑ᵢ αᵢ ≤ √2 ∧ ∀x∈ℝ",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic\u2028sep",
    "control \x00\x01\x7f chars",
    "<|im_start|>user\nhi<|im_end|>\n",
    "text<|endoftext|>more <|im_end|> spaced <repo_name>x",
    "<|im_start|x> not special <im_end>",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case",
    "!!! ??? ... --- === *** ~~~ ```",
    "pneumonoultramicroscopicsilicovolcanoconiosis",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "word" * 30,
]

VARIANTS = ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o", "command-r", "dbrx")

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello! 😀"},
        {"role": "user", "content": '<b>Bye</b> & "thanks"\n'},
    ],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "  spaces  \n\n"}, {"role": "assistant", "content": "ok"}],
]


def transformers_tokenizer(path: Path) -> Any:
    """transformers' own conversion of the GGUF file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def llama_cpp_ids(path: Path) -> list[list[int]] | None:
    """What llama.cpp makes of the texts; None where it is not installed."""
    try:
        import llama_cpp
    except ImportError:
        return None
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=False, special=True) for text in TEXTS]


def write_vocabulary(target: Path, fields: dict[str, Any]) -> None:
    """A GGUF file without tensors, of the given `tokenizer.ggml.*` fields: all that llama.cpp needs to tokenize."""
    import gguf

    writer = gguf.GGUFWriter(str(target), "llama")
    for key in ("context_length", "embedding_length", "feed_forward_length", "block_count", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 8)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_string(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vocabulary_ids(fields: dict[str, Any]) -> list[list[int]]:
    """What llama.cpp makes of the texts with a vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocabulary.gguf"
        write_vocabulary(file, fields)
        return llama_cpp_ids(file) or []


def variant_ids(source: Path) -> dict[str, list[list[int]]]:
    """For each way to split words, what llama.cpp makes of the texts with SmolLM2's tokens and merges."""
    import gguf

    stored = gguf.GGUFReader(str(source)).fields
    names = ("model", "tokens", "token_type", "merges")
    fields = {name: stored[f"tokenizer.ggml.{name}"].contents() for name in names}
    return {pre: vocabulary_ids({**fields, "pre": pre}) for pre in VARIANTS}


def sentence_piece(tokenizer: Any) -> dict[str, Any]:
    """A small SentencePiece vocabulary, of tokens of the given tokenizer, and what llama.cpp makes of the texts."""
    words = [tokenizer.decode([index]).replace(" ", "▁") for index in range(17, 1800)]
    letters = sorted({letter for word in words for letter in word} | {"▁"})
    plain = [word for word in dict.fromkeys([*words, *letters]) if "\ufffd" not in word and word.isprintable()]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *plain]
    fields = {
        "model": "llama",
        "tokens": tokens,
        "scores": [-float(index) for index in range(len(tokens))],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(plain)],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {"fields": fields, "ids": vocabulary_ids(fields)}


def main() -> None:
    """Compares the engines with one another and writes the goldens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("gguf", type=Path)
    path = parser.parse_args().gguf
    tokenizer = transformers_tokenizer(path)
    ids = [tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
    others = llama_cpp_ids(path)
    for text, ours, theirs in zip(TEXTS, ids, others or [], strict=False):
        if ours != theirs:
            print(f"transformers and llama.cpp differ on {text!r}:\n  {ours}\n  {theirs}")
    chats = [
        {
            "messages": messages,
            "add_generation_prompt": prompt,
            "text": tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False),
        }
        for messages in CHATS
        for prompt in (True, False)
    ]
    texts = [
        {
            "text": text,
            "transformers": encoded,
            "llama_cpp": others[index] if others else None,
            "decoded": tokenizer.decode(encoded, skip_special_tokens=True),
        }
        for index, (text, encoded) in enumerate(zip(TEXTS, ids, strict=True))
    ]
    goldens = {
        "texts": texts,
        "chats": chats,
        "variants": variant_ids(path),
        "sentence_piece": sentence_piece(tokenizer),
    }
    GOLDEN.write_text(json.dumps(goldens, separators=(",", ":")) + "\n")
    print(f"wrote {GOLDEN} ({os.path.getsize(GOLDEN)} bytes)")


if __name__ == "__main__":
    main()
