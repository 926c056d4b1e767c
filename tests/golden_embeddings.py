"""Two tiny encoders, rebuilt from seeds, and the texts behind tests/goldens/embeddings.npz.

The goldens hold what transformers computes with these very arrays (scripts/make_embedding_goldens.py). Their
tokenizer.json asks for padding and truncation to 8 tokens, as those of sentence-transformers ask for some: neither
must have an effect.
"""

from __future__ import annotations

import json
import pathlib
import zlib
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

SPECIALS = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
POSITIONS = 40
TEXTS = (
    "a",
    "",
    "the cat sat",
    "The CAT sat!",
    "two words and then some more of them",
    "one, two; three: 4",
    "b c d e f g h i j k l m n o p q r s t u v w x y z",
    "o p q " * 30,  # more than there are positions
)
SENTENCES = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "Ein Mann isst etwas.",
    "How do I install JAX on a TPU?",
    "¿Qué es un caché? 日本語 and emoji 🙂, naïve café",
    "",
    "The key-value cache holds the keys and values of all tokens so far, page by page. " * 30,  # over 256 tokens
)
"""For the real model, all-MiniLM-L6-v2."""

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 1,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "tiny_bert": {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
    },
    "tiny_roberta": {
        "architectures": ["XLMRobertaModel"],
        "model_type": "xlm-roberta",
        "max_position_embeddings": POSITIONS + 2,
        "type_vocab_size": 1,
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
    },
}
NAMES = tuple(_CONFIGS)
MODES = ("cls", "max", "mean")


def config(name: str) -> dict[str, Any]:
    """The contents of the model's config.json."""
    return _COMMON | _CONFIGS[name]


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensor name → shape, (out, in) for matrices; the pooler, which embeddings do not need, included."""
    c = config(name)
    D, F = c["hidden_size"], c["intermediate_size"]
    tables = {"word": c["vocab_size"], "position": c["max_position_embeddings"], "token_type": c["type_vocab_size"]}
    out: dict[str, tuple[int, ...]] = {
        f"embeddings.{table}_embeddings.weight": (rows, D) for table, rows in tables.items()
    }
    layer = {
        **{f"attention.self.{part}": (D, D) for part in ("query", "key", "value")},
        "attention.output.dense": (D, D),
        "attention.output.LayerNorm": (D,),
        "intermediate.dense": (F, D),
        "output.dense": (D, F),
        "output.LayerNorm": (D,),
    }
    modules: dict[str, tuple[int, ...]] = {"embeddings.LayerNorm": (D,), "pooler.dense": (D, D)}
    for i in range(c["num_hidden_layers"]):
        modules |= {f"encoder.layer.{i}.{module}": shape for module, shape in layer.items()}
    for module, shape in modules.items():
        out |= {f"{module}.weight": shape, f"{module}.bias": shape[:1]}
    return out


def tensors(name: str) -> dict[str, np.ndarray]:
    """The model's weights, float32: uniform values of PCG64, a stream that NumPy keeps across versions."""

    def tensor(key: str, shape: tuple[int, ...]) -> np.ndarray:
        rng = np.random.Generator(np.random.PCG64(zlib.crc32(f"{name}/{key}".encode())))
        center, deviation = _scale(key, shape)
        return (center + deviation * np.sqrt(12) * (rng.random(shape) - 0.5)).astype(np.float32)

    return {key: tensor(key, shape) for key, shape in shapes(name).items()}


def _scale(key: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation such that attention is uneven."""
    if key.endswith("bias"):
        return 0.0, 0.3
    if "LayerNorm" in key:
        return 1.0, 0.2
    if "embeddings" in key:
        return 0.0, 0.5
    return 0.0, (2.0 if ".query." in key or ".key." in key else 1.0) / float(np.sqrt(shape[-1]))


def checksum(name: str) -> int:
    """CRC-32 of all weights in name order. Goldens carry it, so that other weights are not taken for a bug."""
    crc = 0
    for key, value in sorted(tensors(name).items()):
        crc = zlib.crc32(value.astype("<f4").tobytes(), zlib.crc32(key.encode(), crc))
    return crc


def tokenizer() -> Tokenizer:
    """WordPiece of letters, digits and a few words, lowercased, between [CLS] and [SEP]."""
    entries = [*SPECIALS, *LETTERS, *(f"##{letter}" for letter in LETTERS), *"0123456789", *",;:!", "the", "cat", "and"]
    made = Tokenizer(models.WordPiece({entry: i for i, entry in enumerate(entries)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(name, entries.index(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    made.add_special_tokens(list(SPECIALS))
    return made


def write_checkpoint(
    name: str, folder: str | pathlib.Path, pooling: str | None = "mean", *, normalize: bool = False, **limits: Any
) -> pathlib.Path:
    """Writes a folder as sentence-transformers does, or, with no pooling, as transformers does; returns it.

    Args:
      name: the model.
      folder: is made.
      pooling: one of `MODES`, or several joined by "+".
      normalize: whether there is a Normalize module.
      **limits: fields of sentence_bert_config.json.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(name)))
    save_file(tensors(name), folder / "model.safetensors", metadata={"format": "pt"})
    made = tokenizer()
    made.enable_padding(length=8, pad_id=1, pad_token="[PAD]")
    made.enable_truncation(8)
    made.save(str(folder / "tokenizer.json"))
    if pooling is None:
        return folder
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] if normalize else [])]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    fields = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens"}
    flags = {f"pooling_mode_{field}": mode in pooling.split("+") for mode, field in fields.items()}
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 48, **flags, "pooling_mode_mean_sqrt_len_tokens": False})
    )
    if limits:
        (folder / "sentence_bert_config.json").write_text(json.dumps(limits))
    return folder
