"""The examples of README and docs/functional.md run as they stand, on the default model."""

import ast
import functools
import pathlib
import re

import pytest

import kvjax

ROOT = pathlib.Path(__file__).parent.parent


def example(path: str) -> str:
    return re.search(r"```python\n(.*?)```", (ROOT / path).read_text(), re.S)[1]  # type: ignore[index]


def test_functional_example(capsys):
    exec(example("docs/functional.md"), {})
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == " Paris." and rest[-1].endswith("towering skyscrapers and bustling")
    assert len(example("docs/functional.md").splitlines()) <= 20


@pytest.mark.slow
def test_readme_example(capsys, monkeypatch):
    monkeypatch.setattr(kvjax, "load", functools.partial(kvjax.load, layers="scanned"))  # compiles faster
    text = (ROOT / "README.md").read_text()
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.S)), {})
    out = capsys.readouterr().out
    assert out.startswith(" Paris") and "stop" in out and "length" in out


@pytest.mark.slow
def test_sharing_example(capsys, monkeypatch):
    monkeypatch.setattr(kvjax, "load", functools.partial(kvjax.load, layers="scanned"))
    exec(example("docs/sharing.md"), {})
    first, second = map(ast.literal_eval, capsys.readouterr().out.splitlines())
    assert first[0] == 0 and first[1] == 64
    assert second[0] == 0 and second[1] == second[2] == second[3] > 64


def test_attention_example(capsys):
    exec(example("docs/attention.md"), {})
    assert capsys.readouterr().out.splitlines() == ["(5, 8, 64) (5, 8) True"] * 2


def test_family_example(capsys):
    exec(example("docs/families.md"), {})
    tokens = ast.literal_eval(capsys.readouterr().out)
    assert len(tokens) == 5 and all(0 <= token < 64 for token in tokens)


@pytest.mark.slow
def test_embedding_example(capsys):
    exec(example("docs/embedding.md"), {})
    assert capsys.readouterr().out.splitlines() == ["(384,)", "[1.   0.72 0.02]", "I forgot my password."]
