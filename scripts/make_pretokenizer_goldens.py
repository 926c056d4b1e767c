"""Writes tests/goldens/pretokenizers.json: what llama.cpp makes of tricky texts, for each `tokenizer.ggml.pre`.

Needs llama-cpp-python, gguf and tokenizers: run it in an environment of its own.

    python scripts/make_pretokenizer_goldens.py
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from make_tokenizer_goldens import write_vocabulary

GOLDEN = Path(__file__).parent.parent / "tests" / "goldens" / "pretokenizers.json"

TEXTS = [
    "Hello world, hello again. Hello (world)!",
    "a  b   c    d  ",
    "  two\n\n\n three\n  \n end \n",
    "\t\ttabs\tand \t spaces\r\n\r\nwindows\r\n",
    "1 12 123 1234 12345 1234567",
    "v1.2.3, $1,234.50; 3x4 x10 -5 +7 50%",
    "½ ²³ Ⅷ ٣٤٥ ४५६७",
    "I'm you're he'll we've I'd it's can't",
    "HE'S YOU'RE WE'LL 'Tis 'round rock'n'roll",
    "it’s ’tis “quoted” ‘x’ — dash…",
    "naïve café Ångström ÉCOLE",
    "cafe\u0301 e\u0301\u0300x \u0301y",
    "Привет, Мир! Καλημέρα ᾼ\u1fbe Ა",
    "你好,世界。今天 天气好!",
    "こんにちは カタカナ、日本語 ー",
    "안녕 하세요 한국어 ㄱㄴ",
    "مرحبا، كيف؟ नमस्ते। สวัสดี א־ב",
    "!!! ?? ... --- ==> != $$ ++ ^^ ~~ || ``",
    "a.b,c;d:e!f?g (h) [i] {j} <k> |l| \\m/",
    ".hello _foo #tag @user $var %d &amp; *x*",
    "😀 😃😄 x🎉y 👍🏽  ",
    "def f(x):\n    return x**2 + 1  # ok\n\n\n",
    "if (a[i] != b->c) {\n\t\tx += 0x1F;\n\t}",
    "<div class='x'>&lt;</div> // http://a.b/c?d=1\n/path/\n",
    "snake_case camelCase PascalCase HTTPServer iPhone15Pro",
    "x\u00a0y\u3000z\u2028w\u200bv \u00a0 \u3000",
    "，全角！？：；～「引用」。、Ａｂｃ１２３",
    "©®™ €5 £6 ¥7 ° ± ∑≤√ →",
    "\u0560\u0580 ა 𝐀𝐛 ƻ ʔ ªº",
    "mix1混合2text３и４٥!? (见a1) x—y",
]

SAME = {
    "gpt-2": ("phi-2", "olmo", "mpt"),
    "smollm": ("starcoder", "refact", "command-r"),
    "llama-bpe": ("llama3", "llama-v3"),
    "dbrx": ("smaug-bpe",),
    "qwen2": ("deepseek-r1-qwen",),
    "tekken": (),
    "gpt-4o": ("llama4",),
    "falcon": (),
    "bloom": (),
    "deepseek-llm": (),
    "deepseek-coder": (),
    "deepseek-v3": (),
}
"""Ways to split words, each with those that must turn out the same; "gpt2" is unknown to llama.cpp."""

WHOLE = [" hello", "HTTPServer", "你好", "   ", "123", " spaces"]
"""Tokens to which no merge leads: only a tokenizer that looks words up before it merges finds them."""


def vocabulary() -> dict[str, Any]:
    """Byte-level BPE with merges across spaces and punctuation, so that each cut shows in the tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(to_bytes.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, max_token_length=4, show_progress=False)
    contractions = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'RE"]
    tokenizer.train_from_iterator([*TEXTS, *contractions * 9], trainer)
    merges = [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    merged = ["".join(merge.split(" ")) for merge in merges]
    whole = ["".join(piece for piece, _ in to_bytes.pre_tokenize_str(text)) for text in WHOLE]
    tokens = list(dict.fromkeys([*alphabet, *merged, *whole]))
    return {"model": "gpt2", "tokens": tokens, "token_type": [1] * len(tokens), "merges": merges}


def llama_cpp_ids(fields: dict[str, Any]) -> list[list[int]]:
    """What llama.cpp makes of the texts with a vocabulary."""
    import llama_cpp

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocabulary.gguf"
        write_vocabulary(file, fields)
        model = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
        return [model.tokenize(text.encode(), add_bos=False, special=False) for text in TEXTS]


def main() -> None:
    """Tokenizes the texts in each way and writes the golden: few lists of ids, and which of them each way gives."""
    fields = vocabulary()
    ids: dict[str, list[list[int]]] = {}
    for pre, others in SAME.items():
        for name in (pre, *others):
            ids[name] = llama_cpp_ids({**fields, "pre": name})
            if ids[name] != ids[pre]:
                raise SystemExit(f"llama.cpp does not split {name} as {pre}")
    seen = {tuple(one): None for each in ids.values() for one in each}
    place = {one: index for index, one in enumerate(seen)}
    golden = {
        "texts": TEXTS,
        "tokens": fields["tokens"],
        "merges": fields["merges"],
        "ids": list(seen),
        "pre": {name: [place[tuple(one)] for one in each] for name, each in ids.items()},
    }
    GOLDEN.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"wrote {GOLDEN} ({os.path.getsize(GOLDEN)} bytes)")


if __name__ == "__main__":
    main()
