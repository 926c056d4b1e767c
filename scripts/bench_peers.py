"""The engines that `scripts/bench_*.py` compare kvjax with: Hugging Face transformers and llama.cpp.

`hf` and `llama_cpp`, for `bench_cpu.py`, are context managers that load the model and give a `Session`: a function
from prompts to a context manager that makes everything ready for that batch and gives `run(new_tokens) -> Timing`.
What they load with, `hf_model` and `llama_model`, serves `bench_batch.py` too.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

Prompts = Sequence[Sequence[int]]
Run = Callable[[int], "Timing"]
Session = Callable[[Prompts, int], AbstractContextManager[Run]]
"""(prompts, most new tokens) → the run of that batch."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """One greedy generation of a batch.

    Attributes:
      prefill_s: seconds from the first prompt token to every row's first new token.
      decode_s: seconds of the decode steps that `decode_tokens` counts.
      decode_tokens: new tokens of the steps in which every row decodes.
      total_s: seconds from the first prompt token to the last new token.
      tokens: new tokens of each row.
      extra: further seconds, by name.
    """

    prefill_s: float
    decode_s: float
    decode_tokens: int
    total_s: float
    tokens: list[list[int]]
    extra: dict[str, float] = dataclasses.field(default_factory=dict)


# --- Hugging Face transformers ------------------------------------------------------------------------------------


def hf_model(model: str | None, threads: int, attention: str = "sdpa") -> Any:
    """Transformers' model in float32.

    Args:
      model: as `kvjax.load` takes it; config and weights come through kvjax's reader, so they are the same numbers.
      threads: of the intra-op pool.
      attention: "sdpa" or "eager".
    """
    import torch
    import transformers

    from kvjax.checkpoints.resolve import open_checkpoint
    from kvjax.models import FAMILIES

    torch.set_num_threads(threads)
    with open_checkpoint(model, FAMILIES) as source:
        config = transformers.AutoConfig.for_model(**source.config)
        config._attn_implementation = attention
        net = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        weights = {name: torch.from_numpy(np.array(source.read(name), np.float32)) for name in source.names()}
    missing, unexpected = net.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"transformers' model misses {missing} and does not know {unexpected}.")
    net.tie_weights()
    return net


@contextlib.contextmanager
def hf(model: str | None, threads: int, *, cache: str = "dynamic", attention: str = "sdpa") -> Iterator[Session]:
    """Transformers in float32, the loop of a static batch as `generate` runs it, without its overhead.

    Args:
      model: as `kvjax.load` takes it.
      threads: of the intra-op pool.
      cache: "dynamic" or "static".
      attention: "sdpa" or "eager".
    """
    import torch
    import transformers

    net = hf_model(model, threads, attention)

    def new_cache(rows: int, length: int) -> Any:
        if cache == "static":
            return transformers.StaticCache(config=net.config, max_cache_len=length)
        return transformers.DynamicCache(config=net.config)

    @contextlib.contextmanager
    def session(prompts: Prompts, most: int) -> Iterator[Run]:
        ids = torch.tensor(prompts)

        def run(new_tokens: int) -> Timing:
            with torch.inference_mode():
                kv = new_cache(len(prompts), ids.shape[1] + new_tokens)
                began = time.perf_counter()
                out = net(input_ids=ids, past_key_values=kv, use_cache=True, logits_to_keep=1)
                columns = [out.logits[:, -1].argmax(-1, keepdim=True)]
                prefilled = time.perf_counter()
                for _ in range(new_tokens - 1):
                    out = net(input_ids=columns[-1], past_key_values=kv, use_cache=True, logits_to_keep=1)
                    columns.append(out.logits[:, -1].argmax(-1, keepdim=True))
                tokens = torch.cat(columns, 1).tolist()
                ended = time.perf_counter()
            steps = len(prompts) * (new_tokens - 1)
            return Timing(prefilled - began, ended - prefilled, steps, ended - began, tokens)

        yield run

    yield session


# --- llama.cpp ----------------------------------------------------------------------------------------------------


class LlamaContext:
    """Sequences and their K/V in llama.cpp, through llama-cpp-python's low-level API; made by `LlamaModel.context`."""

    def __init__(self, api: Any, context: Any, chunk: int, vocab: int):
        self.api, self.context, self.chunk, self.vocab = api, context, chunk, vocab
        self.batch = api.llama_batch_init(chunk, 0, 1)

    def decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Computes (sequence, position, token, whether to give logits); returns sequence → likeliest next token."""
        batch = self.batch
        for i, (sequence, position, token, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        batch.n_tokens = len(entries)
        if code := self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed with code {code}.")
        return {
            entry[0]: int(np.ctypeslib.as_array(self.api.llama_get_logits_ith(self.context, i), (self.vocab,)).argmax())
            for i, entry in enumerate(entries)
            if entry[3]
        }

    def clear(self) -> None:
        """Forgets every sequence."""
        if hasattr(self.api, "llama_memory_clear"):
            self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        else:  # before 0.3.13
            _either(self.api, "llama_kv_self_clear", "llama_kv_cache_clear")(self.context)

    def forget(self, sequence: int) -> None:
        """Forgets one sequence: its cells are free."""
        if hasattr(self.api, "llama_memory_seq_rm"):
            self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), sequence, -1, -1)
        else:  # before 0.3.13
            _either(self.api, "llama_kv_self_seq_rm", "llama_kv_cache_seq_rm")(self.context, sequence, -1, -1)

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)


class LlamaModel:
    """A model in llama.cpp; made by `llama_model`."""

    def __init__(self, api: Any, model: Any):
        self.api, self.model = api, model
        self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    @contextlib.contextmanager
    def context(
        self,
        rows: int,
        length: int,
        threads: int,
        *,
        unified: bool = False,
        flash: bool | None = None,
        ubatch: int = 512,
        float32: bool = False,
    ) -> Iterator[LlamaContext]:
        """Memory for K and V.

        Args:
          rows: sequences at once.
          length: most tokens of each.
          threads: for prompts and for decoding.
          unified: one K/V buffer that all sequences share, instead of one for each.
          flash: whether to use its flash attention; None leaves the choice to it.
          ubatch: n_batch and n_ubatch, tokens that it computes at once.
          float32: K and V in float32 instead of float16.
        """
        params = self.api.llama_context_default_params()
        params.n_ctx = rows * length if unified else rows * _round_up(length, 256)
        params.n_batch = params.n_ubatch = chunk = max(ubatch, rows)
        params.n_seq_max = rows
        params.n_threads = params.n_threads_batch = threads
        _set(params, "kv_unified", unified)
        if float32:
            params.type_k = params.type_v = self.api.GGML_TYPE_F32
        if flash is not None:
            _set(params, "flash_attn_type", int(flash))
            _set(params, "flash_attn", flash)
        made = _either(self.api, "llama_init_from_model", "llama_new_context_with_model")(self.model, params)
        if not made:
            raise RuntimeError(f"llama.cpp cannot make a context of {rows} sequences of {length} tokens.")
        context = LlamaContext(self.api, made, chunk, self.vocab)
        try:
            yield context
        finally:
            context.close()


@contextlib.contextmanager
def llama_model(path: str) -> Iterator[LlamaModel]:
    """A .gguf file in llama.cpp, in the format it is stored in."""
    import llama_cpp as api

    @api.llama_log_callback
    def quiet(*_: Any) -> None:
        pass

    api.llama_log_set(quiet, ctypes.c_void_p(0))
    api.llama_backend_init()
    load = _either(api, "llama_model_load_from_file", "llama_load_model_from_file")
    model = load(str(path).encode(), api.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}.")
    try:
        yield LlamaModel(api, model)
    finally:
        _either(api, "llama_model_free", "llama_free_model")(model)


@contextlib.contextmanager
def llama_cpp(
    path: str, threads: int, *, unified: bool = False, flash: bool | None = None, ubatch: int = 512
) -> Iterator[Session]:
    """llama.cpp with every row of the batch a sequence, one `llama_decode` a step; see `LlamaModel.context`."""
    with llama_model(path) as model:

        @contextlib.contextmanager
        def session(prompts: Prompts, most: int) -> Iterator[Run]:
            rows, length = len(prompts), max(map(len, prompts)) + most
            entries = [(s, i, t, i == len(p) - 1) for s, p in enumerate(prompts) for i, t in enumerate(p)]

            def run(new_tokens: int) -> Timing:
                context.clear()
                began = time.perf_counter()
                last: dict[int, int] = {}
                for start in range(0, len(entries), context.chunk):
                    last |= context.decode(entries[start : start + context.chunk])
                prefilled = time.perf_counter()
                tokens = [[last[s]] for s in range(rows)]
                for step in range(new_tokens - 1):
                    last = context.decode([(s, len(prompts[s]) + step, last[s], True) for s in range(rows)])
                    for s in range(rows):
                        tokens[s].append(last[s])
                ended = time.perf_counter()
                return Timing(prefilled - began, ended - prefilled, rows * (new_tokens - 1), ended - began, tokens)

            with model.context(rows, length, threads, unified=unified, flash=flash, ubatch=ubatch) as context:
                yield run

        yield session


def write_float32_gguf(source: str, target: str) -> None:
    """Copies a .gguf file with every tensor in float32, dequantized by the package that kvjax's reader uses."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        elif name != "general.architecture" and not name.startswith("GGUF."):  # the writer's own
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _either(api: Any, *names: str) -> Any:
    """The first of these functions that this version of llama-cpp-python has."""
    found = next((getattr(api, name) for name in names if hasattr(api, name)), None)
    if found is None:
        raise RuntimeError(f"This version of llama-cpp-python has none of {', '.join(names)}: install another.")
    return found


def _set(params: Any, field: str, value: Any) -> None:
    """Sets a field where this version of llama.cpp has it."""
    if field in dict(params._fields_):
        setattr(params, field, value)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
