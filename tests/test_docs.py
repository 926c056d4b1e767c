"""The examples of README and docs/functional.md run as they stand, on the default model."""

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
    exec(example("README.md"), {})
    out = capsys.readouterr().out
    assert out.startswith(" Paris") and "stop" in out and "length" in out
