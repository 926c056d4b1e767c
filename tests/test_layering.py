"""Arrows point one way: pallas_kernels ← kvjax ← models ← the façade ← scripts."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FACADE = (
    *("kvjax.llm", "kvjax.async_llm", "kvjax.embedding", "kvjax.evaluation", "kvjax.cli", "kvjax.batch"),
    "kvjax.__main__",
)
"""Modules of kvjax that stand above the families."""


def layer(module: str) -> int:
    """0 kernels, 1 engine, 2 families, 3 façade, 4 scripts."""
    if module.startswith("kvjax.pallas_kernels"):
        return 0
    if module.startswith("kvjax.models"):
        return 2
    if module.startswith(FACADE):
        return 3
    return 1 if module.startswith("kvjax") else 4


def modules() -> dict[str, pathlib.Path]:
    found = {}
    for folder, package in (("kvjax", "kvjax"), ("models", "kvjax.models"), ("pallas_kernels", "kvjax.pallas_kernels")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if parts[0] in ("models", "pallas_kernels") and folder == "kvjax":
                continue  # the symlinks
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def imports(path: pathlib.Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if re.match(r"kvjax\b", name)}


@pytest.mark.parametrize("module, path", modules().items(), ids=list(modules()))
def test_imports_point_down(module, path):
    if module == "kvjax":
        return  # the public names; its façade is imported on first use, see test_importing_the_engine_loads_no_family
    for name in imports(path):
        assert layer(name) <= layer(module), f"{module} imports {name}, which stands above it"


def test_importing_the_engine_loads_no_family():
    code = (
        "import sys, kvjax, kvjax.job, kvjax.engine; print([m for m in sys.modules if m.startswith('kvjax.models')]);"
        "print([m for m in ('gguf','typer','tokenizers','safetensors','huggingface_hub','jinja2','torch') "
        "if m in sys.modules]); kvjax.load; print('kvjax.models.llama' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split("\n")[:3] == ["[]", "[]", "True"], done.stderr


def test_folders_import_under_kvjax_only():
    assert (ROOT / "kvjax" / "models").resolve() == ROOT / "models"
    assert (ROOT / "kvjax" / "pallas_kernels").resolve() == ROOT / "pallas_kernels"
