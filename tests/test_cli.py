"""The command line, in this process and, where signals or pipes matter, as a process of its own."""

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import gguf
import golden_models
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import kvjax
import kvjax.batch
from kvjax.checkpoints.safetensors import SafetensorsSource
from kvjax.cli import app as app_module
from kvjax.cli import chat as chat_module
from kvjax.cli import main, runtime
from kvjax.cli.info import describe

RAW = ("--raw", "--max-new-tokens", "12")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return golden_models.write_checkpoint("tiny_llama", tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def llm(model):
    return kvjax.load(str(model))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where processes of this module keep what they compile, each for the next."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _no_compile_cache(monkeypatch):
    monkeypatch.setenv("KVJAX_NO_COMPILE_CACHE", "1")


def start(cache, *args):
    env = {**os.environ, "KVJAX_CACHE": str(cache), "KVJAX_NO_COMPILE_CACHE": ""}
    env["PYTHONPATH"] = str(Path(kvjax.__file__).parents[1])
    command = [sys.executable, "-m", "kvjax", *map(str, args)]
    return subprocess.Popen(command, env=env, stdin=PIPE, stdout=PIPE, stderr=PIPE)


def invoke(*args, text=None):
    result = CliRunner().invoke(app_module.app, [str(arg) for arg in args], input=text)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# generate


def test_generate_writes_the_text_and_nothing_else(llm, model, cache):
    expected = llm.generate("bado", max_new_tokens=12).text
    assert len(expected) > 5
    process = start(cache, "generate", "bado", "-m", model, *RAW)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out.decode(), err.decode()) == (0, expected, "")
    assert any((cache / "xla").iterdir())  # what XLA compiled is there for the next process


def test_generate_wraps_the_prompt_as_a_message(llm, model):
    user = {"role": "user", "content": "hi"}
    system = {"role": "system", "content": "be brief"}
    limit = ("--max-new-tokens", "12")
    assert invoke("generate", "hi", "-m", model, *limit).stdout == llm.generate([user], max_new_tokens=12).text
    expected = llm.generate([system, user], max_new_tokens=12).text
    assert invoke("generate", "hi", "-m", model, "--system", "be brief", *limit).stdout == expected
    result = invoke("generate", "hi", "-m", model, "--raw", "--system", "be brief")
    assert (result.exit_code, result.stderr.count("error:")) == (2, 1)


def test_generate_without_a_chat_template_takes_the_prompt_as_it_is(llm, model, tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    limit = ("--max-new-tokens", "12")
    assert invoke("generate", "hi", "-m", tmp_path, *limit).stdout == llm.generate("hi", max_new_tokens=12).text
    for options in (["--chat"], ["--system", "x"]):
        result = invoke("generate", "hi", "-m", tmp_path, *options)
        assert (result.exit_code, result.stderr.count("error:")) == (2, 1)
        assert "no chat template" in result.stderr
    assert "no chat template" in invoke("chat", "-m", tmp_path).stderr


def test_generate_reads_stdin(llm, model):
    expected = llm.generate("bado\nfu", max_new_tokens=12).text
    assert invoke("generate", "-", "-m", model, *RAW, text="bado\nfu").stdout == expected


def test_sampling_options_reach_the_sampler(llm, model):
    given = {
        "min_new_tokens": 2,
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "ignore_eos": True,
        "stop": ("zz", "qq"),
        "stop_token_ids": (7, 8),
        "logit_bias": {20: -3.0, 21: 1.5},
    }
    words = []
    for name, value in given.items():
        flag = "--" + {"stop_token_ids": "stop_token_id"}.get(name, name).replace("_", "-")
        if value is True:
            words += [flag]
        elif isinstance(value, dict):
            words += [word for key, item in value.items() for word in (flag, f"{key}={item}")]
        else:
            words += [word for item in (value if isinstance(value, tuple) else [value]) for word in (flag, str(item))]
    expected = llm.generate("bado", max_new_tokens=12, seed=9, **given).text
    assert expected != llm.generate("bado", max_new_tokens=12).text
    assert invoke("generate", "bado", "-m", model, *RAW, "--seed", 9, *words).stdout == expected


def test_length_defaults_to_what_the_context_has_room_for(llm, model):
    prompt = "ba" * 250
    expected = llm.generate(prompt, max_new_tokens=6, ignore_eos=True).text
    assert invoke("generate", prompt, "-m", model, "--raw", "--ignore-eos").stdout == expected


def test_info_lists_the_families():
    shown = invoke("info", "--families")
    assert shown.exit_code == 0 and "deepseek" in shown.stdout and "DeepseekV3ForCausalLM" in shown.stdout
    listed = json.loads(invoke("info", "--families", "--json").stdout)
    assert listed["mpt"] == ["MptForCausalLM", "MPTForCausalLM"] and "BertModel" in listed["bert"]


def test_loading_options_reach_the_loader(model, monkeypatch):
    seen: dict[str, Any] = {}

    def load(what, **options):
        seen.update(options, what=what)
        raise kvjax.ModelError("enough")

    monkeypatch.setattr("kvjax.llm.load", load)
    options = (
        "--context",
        99,
        "--dtype",
        "bfloat16",
        "--kv-dtype",
        "float16",
        "--rope",
        "yarn:4",
        "--layers",
        "scanned",
        "--mesh",
        "seq=2,model=4",
        "--evict",
        "snapkv+adakv",
        "--keep",
        "50%",
        "--evict-every",
        7,
    )
    assert invoke("generate", "a", "-m", model, *options).exit_code == 2
    assert dict(seen.pop("mesh").shape) == {"seq": 2, "model": 4}
    assert seen == {
        "what": str(model),
        "context": 99,
        "dtype": "bfloat16",
        "kv_dtype": "float16",
        "layers": "scanned",
        "rope": "yarn:4",
        "evict": "snapkv+adakv",
        "keep": 0.5,
        "evict_every": 7,
    }
    assert all(type(seen[name]) is str for name in ("dtype", "kv_dtype", "layers"))
    invoke("generate", "a")
    nothing = dict.fromkeys(("what", "context", "dtype", "kv_dtype", "rope", "mesh", "evict", "keep"))
    assert seen == nothing | {"layers": "unrolled", "evict_every": 32}


@pytest.mark.slow
def test_ctrl_c_ends_generate_with_130(model, cache):
    long = ("--context", 30000, "--max-new-tokens", 25000, "--ignore-eos")
    process = start(cache, "generate", "bado", "-m", model, "--raw", *long)
    assert process.stdout.read(1)  # text has appeared
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err, out[-1:]) == (130, b"", b"\n")


def test_ctrl_c_while_a_piece_is_written_still_ends_the_line(model, monkeypatch, capsys):
    def write(text):
        captured.append(text)
        if len(captured) == 1:
            raise KeyboardInterrupt

    captured: list[str] = []
    monkeypatch.setattr(sys.stdout, "write", write)
    assert main(["generate", "bado", "-m", str(model), *RAW]) == 130
    assert captured[0]
    assert captured[1:] == ["\n"]


def test_ctrl_c_before_the_command_runs_ends_with_130(monkeypatch, capsys):
    class Interrupted:
        def find_spec(self, name, *_):
            if name == "kvjax.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "kvjax.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert main(["--version"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("sign", ["SIGINT", "SIGTERM"])
def test_a_signal_is_not_lost_in_a_callback(tmp_path, sign):
    """Python drops exceptions of such callbacks, and JAX has one in the garbage collector."""
    (tmp_path / "in.jsonl").touch()
    code = f"""
import gc, signal, sys, time
import kvjax.batch
from kvjax.cli import main
def callback(*_):
    gc.callbacks.remove(callback)
    signal.raise_signal(signal.{sign})
def run(*_, **__):
    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(60)
from kvjax.cli import batch
batch._settings = lambda loading: None
kvjax.batch.run = run
sys.exit(main(["batch", "in", "out"]))
"""
    env = {**os.environ, "PYTHONPATH": str(Path(kvjax.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=50, check=False)
    assert done.returncode == {"SIGINT": 130, "SIGTERM": 0}[sign]
    assert done.stderr.startswith(b"Stopped: what is finished is in out;")


def test_ctrl_c_within_imports_ends_the_process_with_130():
    code = "import signal, kvjax.cli.interrupts as i\nwith i.exit_at_once():\n signal.raise_signal(signal.SIGINT)\n"
    env = {**os.environ, "PYTHONPATH": str(Path(kvjax.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


# chat


def test_chat_keeps_its_history(llm, model):
    first = {"role": "user", "content": "bado"}
    answer = llm.generate([first], max_new_tokens=9).text
    history = [first, {"role": "assistant", "content": answer}, {"role": "user", "content": "fu"}]
    second = llm.generate(history, max_new_tokens=9).text
    brief = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "fu"}]
    third = llm.generate(brief, max_new_tokens=9).text
    lines = "bado\n\nfu\n/reset\n/system be brief\nfu\n/nonsense\n/quit\nfu\n"
    result = invoke("chat", "-m", model, "--max-new-tokens", 9, text=lines)
    said = ["(the conversation is forgotten)", "(the system message is set)"]
    unknown = "There is no command /nonsense: /help lists them."
    assert result.stdout == "\n".join([answer, second, *said, third, unknown, ""])
    assert result.exit_code == 0


def test_chat_ends_with_its_input(model):
    assert invoke("chat", "-m", model, text="/help").exit_code == 0
    result = invoke("chat", "-m", model, text="")
    assert (result.exit_code, result.stdout) == (0, "")


def test_chat_says_when_the_context_is_full_and_goes_on(llm, model):
    lines = "ba" * 300 + "\nfu\n"
    result = invoke("chat", "-m", model, "--max-new-tokens", 9, text=lines)
    assert result.exit_code == 0
    assert re.fullmatch(r"error: The conversation has \d+ tokens .* /reset to begin a new one\.\n", result.stderr)
    assert result.stdout == llm.generate([{"role": "user", "content": "fu"}], max_new_tokens=9).text + "\n"


class Keyboard:
    """A person's lines; an exception in between is Ctrl-C."""

    def __init__(self, *lines):
        self.lines = list(lines)

    def __call__(self):
        line = self.lines.pop(0)
        if line is KeyboardInterrupt:
            raise line
        return line


def test_ctrl_c_stops_the_answer_and_keeps_it(model, monkeypatch):
    prompts = []

    def speak(llm, ids, params, seed, end):
        prompts.append(llm.tokenizer.decode(ids, skip_special_tokens=False))
        yield "par"
        yield "tial"
        if len(prompts) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat_module, "speak", speak)
    monkeypatch.setattr(chat_module, "_read_line", Keyboard("one", KeyboardInterrupt, "not read"))
    assert invoke("chat", "-m", model).exit_code == 0
    assert len(prompts) == 1  # the second Ctrl-C, at the prompt, ended the chat

    prompts.clear()
    monkeypatch.setattr(chat_module, "_read_line", Keyboard("one", "two", KeyboardInterrupt, "three", None))
    assert invoke("chat", "-m", model).exit_code == 0
    assert "<|im_start|>assistant\npartial<|im_end|>\n<|im_start|>user\ntwo" in prompts[1]
    assert len(prompts) == 3  # a single Ctrl-C at the prompt does not end it


# batch


LONG = [
    {"prompt": word, "temperature": 0.9, "max_tokens": 20 + 7 * (i % 9)} for i, word in enumerate(["bado", "fu"] * 200)
]
OPTIONS = ("--slots", 4, "--ignore-eos")


@pytest.fixture(scope="module")
def long_job(model, cache, tmp_path_factory):
    """An input that takes some seconds, its output, and how to run it."""
    folder = tmp_path_factory.mktemp("long")
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LONG))
    process = start(cache, "batch", folder / "in.jsonl", folder / "out.jsonl", "-m", model, *OPTIONS)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (0, b""), err
    assert err.decode().splitlines()[-1].startswith("400 records, 0 of them errors: 600 tokens of prompts")
    return folder


def run_until(cache, model, folder, job, records, sign):
    """Runs the job until its file has so many records, then sends a signal; returns the process's end."""
    target = folder / "out.jsonl"
    process = start(cache, "batch", job / "in.jsonl", target, "-m", model, *OPTIONS)
    while process.poll() is None and (not target.exists() or target.read_bytes().count(b"\n") < records):
        time.sleep(0.01)
    process.send_signal(sign)
    _, err = process.communicate(timeout=60)
    return process.returncode, err.decode()


def test_killed_again_and_again_batch_ends_with_the_same_bytes(model, cache, long_job, tmp_path):
    whole = (long_job / "out.jsonl").read_bytes()
    rng = random.Random(int(os.environ.get("KVJAX_TEST_SEED", "0")))
    for records in sorted(rng.randrange(350) for _ in range(2)):
        code, _ = run_until(cache, model, tmp_path, long_job, records, signal.SIGKILL)
        assert code == -signal.SIGKILL
        left = (tmp_path / "out.jsonl").read_bytes()
        assert whole.startswith(left)
        assert len(left) < len(whole)
    code, err = run_until(cache, model, tmp_path, long_job, 401, signal.SIGKILL)
    assert code == 0
    assert "were there" in err
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.job"]


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_signals_end_batch_with_a_line_that_says_how_to_go_on(model, cache, long_job, tmp_path, sign, code):
    returned, err = run_until(cache, model, tmp_path, long_job, 40, sign)
    assert returned == code
    assert err.splitlines()[-1].startswith("Stopped: what is finished is in ")
    assert "run the same command again" in err
    assert "Traceback" not in err
    left = (tmp_path / "out.jsonl").read_bytes()
    assert left.endswith(b"\n")
    assert (long_job / "out.jsonl").read_bytes().startswith(left)


def test_batch_through_pipes(llm, model, monkeypatch):
    lines = '{"prompt": "bado", "custom_id": "x"}\nnonsense\n'
    result = invoke("batch", "-", "-", "-m", model, "--max-new-tokens", 12, "--slots", 1, text=lines)
    first, second = map(json.loads, result.stdout.splitlines())
    assert first["text"] == llm.generate("bado", max_new_tokens=12).text
    assert (first["custom_id"], second["custom_id"], second["index"]) == ("x", None, 1)
    assert "not valid JSON" in second["error"]["message"]
    assert result.stderr.splitlines()[-1].startswith("2 records, 1 of them errors: 2 tokens of prompts, 12 generated")


def test_batch_and_python_take_each_others_files(llm, model, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "bado"}\n')
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    kvjax.batch.run(llm, source, target, defaults={"max_new_tokens": 12})
    before = target.read_bytes()
    options = ("-m", model, "--max-new-tokens", 12)
    assert "nothing to do" in invoke("batch", source, target, *options).stderr
    result = invoke("batch", source, target, *options, "--temperature", 0.5)
    assert (result.exit_code, result.stderr.count("error:")) == (2, 1)
    assert "default temperature 0.0, not 0.5" in result.stderr
    assert target.read_bytes() == before
    assert invoke("batch", source, target, *options, "--temperature", 0.5, "--overwrite").exit_code == 0
    assert target.read_bytes() != before


def test_batch_in_shards(llm, model, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "bado"}\n')
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    kvjax.batch.run(llm, source, target, defaults={"max_new_tokens": 12})
    for shard, expected in (("0-of-2", target.read_bytes()), ("1-of-2", b"")):
        own = tmp_path / f"out.{shard}.jsonl"
        options = ("-m", model, "--max-new-tokens", 12, "--shard", shard.replace("-of-", "/"))
        assert invoke("batch", source, target, *options).exit_code == 0
        assert own.read_bytes() == expected
        count = expected.count(b"\n")
        assert invoke("batch", source, target, *options).stderr == (
            f"{own} has all {count} records already: nothing to do.\n"
        )


# info, convert, the rest


SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
    "eos_token_id": 2,
}


@pytest.fixture
def smollm2(model, tmp_path):
    """SmolLM2's configuration, with a tensor that its shape does not ask for: info must not care."""
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    save_file({"w": np.zeros((3, 5), np.float16)}, tmp_path / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    return tmp_path


def test_info_counts_bytes_without_reading_weights(smollm2, monkeypatch):
    monkeypatch.setattr(SafetensorsSource, "read_rows", None)
    facts = json.loads(invoke("info", smollm2, "--json").stdout)
    assert facts["kv"] == {
        "float32": {"bytes_per_token": 46080, "bytes_at_1024": 47185920, "bytes_at_context": 377487360},
        "bfloat16": {"bytes_per_token": 23040, "bytes_at_1024": 23592960, "bytes_at_context": 188743680},
        "int8": {"bytes_per_token": 12240, "bytes_at_1024": 12533760, "bytes_at_context": 100270080},  # with scales
    }
    assert facts["kv"]["float32"]["bytes_per_token"] == 30 * 3 * (64 + 64) * 4
    named = {name: facts[name] for name in ("architecture", "layers", "heads", "kv_heads", "head_dim", "width", "ffw")}
    assert named == {
        "architecture": "LlamaForCausalLM",
        "layers": 30,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
        "width": 576,
        "ffw": 1536,
    }
    assert (facts["vocab"], facts["context"], facts["rope"]["theta"]) == (49152, 8192, 100000)
    assert (facts["parameters"], facts["dtypes"]) == (15, {"float16": 1})
    assert (facts["chat_template"], facts["bos_id"], facts["eos_ids"]) == (True, 0, [2])


def test_info_for_people(smollm2, model, tmp_path):
    text = invoke("info", smollm2).stdout
    assert re.search(r"^kv float32 +46,080 bytes per token: 45.0 MiB at 1,024 tokens, 360.0 MiB at 8,192$", text, re.M)
    assert re.search(r"^rope +kind default, theta 100000.0, dim 64$", text, re.M)
    assert re.search(r"^architecture +LlamaForCausalLM$", text, re.M)
    mistral = golden_models.write_checkpoint("tiny_mistral", tmp_path / "mistral")
    assert re.search(r"^windows +8 in 3 of 3 layers$", invoke("info", mistral).stdout, re.M)
    assert describe(str(model), context=100)["kv"]["float32"]["bytes_at_context"] == 3 * 2 * 32 * 4 * 100


def test_convert_and_load_give_the_same_tokens(llm, model, tmp_path):
    target = tmp_path / "orbax"
    result = invoke("convert", model, target)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.endswith("30 tensors\n")
    converted = kvjax.load(str(target))
    assert converted.generate("bado", max_new_tokens=12).tokens == llm.generate("bado", max_new_tokens=12).tokens
    again = invoke("convert", model, target)
    assert (again.exit_code, again.stderr.count("error:")) == (2, 1)
    assert "exists already" in again.stderr


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{kvjax.__version__}\n"
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out
    assert main(["batch", "--help"]) == 0
    assert "--overwrite" in capsys.readouterr().out


def test_debug_keeps_the_traceback(tmp_path, cache):
    process = start(cache, "-v", "info", tmp_path / "none")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"Traceback" in err
    with pytest.raises(kvjax.ModelError):
        main(["--debug", "info", str(tmp_path / "none")])


def test_our_own_faults_keep_their_traceback(model, monkeypatch):
    monkeypatch.setattr("kvjax.llm.load", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["generate", "a", "-m", str(model)])


def test_the_package_needs_no_command_line():
    code = "import kvjax, kvjax.batch, sys; print({'typer', 'rich', 'jax'} & set(sys.modules))"
    env = {**os.environ, "PYTHONPATH": str(Path(kvjax.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True).stdout == b"set()\n"


def test_characters_that_the_terminal_lacks_become_question_marks(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["--version"]) == 0
    stdout.write("aé→")
    stdout.flush()
    assert stdout.buffer.getvalue().endswith(b"a\xe9?")


@pytest.mark.parametrize(
    ("env", "before", "expected"),
    [({}, None, "xla"), ({}, "/elsewhere", "/elsewhere"), ({"KVJAX_NO_COMPILE_CACHE": "1"}, None, None)],
)
def test_compilation_cache(monkeypatch, tmp_path, env, before, expected):
    import jax

    config: Any = jax.config  # its options have no types
    seconds = config.jax_persistent_cache_min_compile_time_secs
    monkeypatch.delenv("KVJAX_NO_COMPILE_CACHE")
    for name, value in {"KVJAX_CACHE": str(tmp_path), **env}.items():
        monkeypatch.setenv(name, value)
    try:
        jax.config.update("jax_compilation_cache_dir", before)
        runtime.keep_compiled()
        found = config.jax_compilation_cache_dir
        assert found == (str(tmp_path / "xla") if expected == "xla" else expected)
        assert config.jax_persistent_cache_min_compile_time_secs == (0.5 if expected else seconds)
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


# bad input


def truncate(path, size):
    path.write_bytes(path.read_bytes()[:size])


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: np.ascontiguousarray(change(name, value)) for name, value in tensors.items()},
        folder / "model.safetensors",
    )


def truncated_gguf(folder):
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.ones((64, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    truncate(path, path.stat().st_size - 1000)
    return path


def smaller_vocabulary(folder):
    change_config(folder, vocab_size=300)
    change_tensors(folder, lambda name, value: value[:300] if value.shape[0] == 320 else value)


def wrong_shape(folder):
    change_tensors(folder, lambda name, value: value[:, :-1] if name.endswith("layers.1.mlp.up_proj.weight") else value)


def only_a_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def written(name, data):
    def write(folder):
        (folder / name).write_bytes(data)
        return folder / name

    return write


BAD_MODELS = {
    "missing file": (lambda folder: folder / "none.gguf", "no such file"),
    "missing folder": (lambda folder: folder / "none" / "deeper", "no such file"),
    "wrong format": (written("model.gguf", b"plain text, and enough of it to fill a header"), "no usable GGUF"),
    "empty folder": (lambda folder: [file.unlink() for file in folder.iterdir()] and None, "no .safetensors"),
    "truncated gguf": (truncated_gguf, "no usable GGUF"),
    "truncated safetensors": (lambda folder: truncate(folder / "model.safetensors", 100_000), "truncated"),
    "unknown architecture": (lambda folder: change_config(folder, architectures=["RwkvForCausalLM"]), "Rwkv"),
    "wrong shape": (wrong_shape, "layers.1.mlp.up_proj"),
    "vocabulary mismatch": (smaller_vocabulary, "vocabulary of 300"),
    "broken config": (written("config.json", b"{"), None),
    "pickle": (written("pytorch_model.bin", b"\x80\x04"), "pickle"),
    "folder with a pickle": (only_a_pickle, "pickle"),
}


@pytest.mark.parametrize("what", BAD_MODELS)
def test_bad_models_get_one_line(what, tmp_path, capsys):
    folder = golden_models.write_checkpoint("tiny_llama", tmp_path / "m")
    spoil, part = BAD_MODELS[what]
    where = spoil(folder) or folder
    if what == "broken config":
        where, part = folder, "config.json"
    code = main(["generate", "hi", "-m", str(where)])
    assert_one_line(code, capsys.readouterr(), part)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--temperature", "hot"], "--temperature"),
        (["--top-p", "0"], "top_p is 0"),
        (["--top-k", "-3"], "top_k is -3"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--max-new-tokens", "1000"], "exceed the context of 256"),
        (["--max-new-tokens", "1", "--min-new-tokens", "2"], "min_new_tokens is 2"),
        (["--stop", ""], "empty string"),
        (["--stop-token-id", "5000"], "stop_token_ids contains 5000: give token ids from 0 to 319"),
        (["--logit-bias=-1=1"], "logit_bias contains -1: give token ids from 0 to 319"),
        (["--logit-bias", "x"], "TOKEN=NUMBER"),
        (["--seed", "-1"], "--seed"),
        (["--context", "1"], "context is 1"),
        (["--dtype", "int4"], "--dtype"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_impossible_options_get_one_line(words, part, model, capsys):
    assert_one_line(main(["generate", "hi", "-m", str(model), *words]), capsys.readouterr(), part)


BAD_SHARDS = ("3/2", "a/b", "-1/4", "0/0", "4/4", "")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["nonsense"], "nonsense"),
        (["generate"], "prompt"),
        (["generate", "a" * 300, "--raw"], "exceed the context of 256"),
        (["generate", "", "--raw"], "empty"),
        (["generate", "\udcff", "--raw"], "Unicode"),
        (["batch", "none.jsonl", "out.jsonl"], "no such file"),
        (["batch", "none.jsonl", "out.jsonl", "--samples", "0"], "n is 0"),
        (
            ["batch", "in.jsonl", "out.jsonl", "--logit-bias=-1=1"],
            "logit_bias contains -1: give token ids from 0 to 319",
        ),
        (
            ["batch", "in.jsonl", "out.jsonl", "--max-new-tokens", "256"],
            "context of 256 tokens has to hold the prompts",
        ),
        (["batch", "in.jsonl", "."], ". is a folder"),
        *((["batch", "in.jsonl", "out.jsonl", "--shard", bad], f"shard is '{bad}'") for bad in BAD_SHARDS),
        (["chat", "--stop-token-id", "320"], "stop_token_ids contains 320: give token ids from 0 to 319"),
        (["convert"], "SRC"),
    ],
)
def test_bad_commands_get_one_line(words, part, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    words = [*words, "-m", str(model)] if words[0] in ("generate", "batch", "chat") and len(words) > 1 else words
    assert_one_line(main(words), capsys.readouterr(), part)


def test_bad_input_of_a_process(tmp_path, cache):
    process = start(cache, "generate", "hi", "-m", tmp_path / "none.gguf")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, b"")
    assert err.decode() == f"error: There is no such file or folder: {tmp_path / 'none.gguf'}.\n"


def assert_one_line(code, captured, part):
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == captured.err.count("error:") == 1
    assert part in captured.err
    assert "Traceback" not in captured.err
