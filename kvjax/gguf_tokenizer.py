"""The tokenizer that a GGUF file's metadata describe, built for the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvjax.checkpoints.source import one_line
from kvjax.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type

_CONTRACTIONS = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"]
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = rf"(?:{_CONTRACTIONS})|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"(?:{_CONTRACTIONS})|{_WORD}|\p{{N}}|{_TAIL}"
_TEKKEN = rf"{'|'.join(_CASED)}|\p{{N}}|{_SLASH_TAIL}"
_GPT4O = rf"{'|'.join(f'{word}(?:{_CONTRACTIONS})?' for word in _CASED)}|\p{{N}}{{1,3}}|{_SLASH_TAIL}"

_CASED_LETTERS = (  # of scripts with two cases, as DeepSeek's tokenizer.json lists them
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "Ὗ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳ"
    "Ꙁ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)

_FALCON = (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _CJK, r"\p{N}+")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)

_PATTERNS = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "phi-2", "olmo", "mpt"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    "falcon": _FALCON,
    "bloom": (_BLOOM,),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
}
"""tokenizer.ggml.pre → patterns that cut the text in turn, before BPE."""

_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word that is a token needs no merges
_BOS_BY_DEFAULT = _WHOLE_WORDS
_NFC = ("qwen2",)

_END_NAMES = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|end_of_text|>",
)
"""Control tokens that end a turn or a text whether or not the metadata say so; llama.cpp knows them by name too."""


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Args:
      metadata: the file's metadata with its `tokenizer.ggml.*` keys.

    Raises:
      ModelError: there is none, it is damaged, or of a kind that is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    makers = {"gpt2": _byte_level, "llama": _sentence_piece}
    if kind not in makers:
        raise ModelError(f"This GGUF file has a tokenizer of kind {kind!r}; only 'gpt2' and 'llama' are supported.")
    try:
        tokens = metadata["tokenizer.ggml.tokens"]
        if len(set(tokens)) != len(tokens):
            raise ValueError("a token is there twice")
        tokenizer = makers[kind](metadata, tokens)
        _add_special(tokenizer, metadata, tokens)
        _add_template(tokenizer, metadata, tokens)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ModelError(f"This GGUF file has a damaged tokenizer ({reason}).") from error
    return tokenizer


def eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end a text or a turn: those the metadata name, then control tokens known by name."""
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    pairs = enumerate(zip(tokens, kinds, strict=False))
    known = [index for index, (token, kind) in pairs if kind == _CONTROL and token in _END_NAMES]
    return tuple(dict.fromkeys(index for index in [*named, *known] if isinstance(index, int)))


def config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an equivalent tokenizer_config.json."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    fields: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            fields[f"{name}_token"] = tokens[index]
    fields["add_bos_token"] = _adds_bos(metadata)
    fields["clean_up_tokenization_spaces"] = False
    if metadata.get("tokenizer.chat_template"):
        fields["chat_template"] = metadata["tokenizer.chat_template"]
    return fields


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PATTERNS:
        raise ModelError(f"This GGUF file splits words in the way {pre!r}, which is not supported.")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata["tokenizer.ggml.scores"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = _merges(vocabulary, scores)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        tokenizer.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union has the best score: BPE merges, ranked by that score."""
    ranked = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_special(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    from tokenizers import AddedToken

    kinds = metadata.get("tokenizer.ggml.token_type", [])
    pairs = list(zip(tokens, kinds, strict=False))
    special = [token for token, kind in pairs if kind in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in pairs if kind == _USER_DEFINED])


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    by_default = (
        metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT
    )
    return bool(metadata.get("tokenizer.ggml.add_bos_token", by_default))


def _add_template(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Has `encode` put the first and last token around a text, where the file asks for it."""
    from tokenizers import processors

    bos = metadata.get("tokenizer.ggml.bos_token_id") if _adds_bos(metadata) else None
    eos = metadata.get("tokenizer.ggml.eos_token_id") if metadata.get("tokenizer.ggml.add_eos_token") else None
    if bos is None and eos is None:
        return
    around = [f"{tokens[bos]}:{{}}"] if bos is not None else []
    after = [f"{tokens[eos]}:{{}}"] if eos is not None else []
    used = dict.fromkeys(index for index in (bos, eos) if index is not None)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*(item.format(0) for item in around), "$A:0", *(item.format(0) for item in after)],
        pair=[
            *(item.format(0) for item in around),
            "$A:0",
            *(item.format(0) for item in after),
            *(item.format(1) for item in around),
            "$B:1",
            *(item.format(1) for item in after),
        ],
        special_tokens=[(tokens[index], index) for index in used],
    )
