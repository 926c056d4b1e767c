"""The example of docs/ray.md runs as a process of its own, on two cores and a small model."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import golden_models
import pytest

import kvjax

ROOT = Path(__file__).parent.parent
START = "import ray\nray.init(num_cpus=2, include_dashboard=False, object_store_memory=10**8)\n"


def example(**changes: str) -> str:
    """The code of docs/ray.md, with other values of some arguments."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/ray.md").read_text(), re.S)[1]  # type: ignore[index]
    for name, value in changes.items():
        code, count = re.subn(rf"\b{name}=[^,)]+", f"{name}={value}", code)
        assert count == 1, name
    return code


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install -e '.[ray]'")
def test_example(tmp_path):
    """Four equal prompts in two batches: each is sampled with its row's number as the seed, whatever its batch."""
    model = golden_models.write_checkpoint("tiny_llama", tmp_path / "m")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"id": i, "prompt": "bado"}) + "\n" for i in range(4)))
    (tmp_path / "run.py").write_text(START + example(model=repr(str(model)), batch_size="2"))
    with tempfile.TemporaryDirectory() as folder:  # the paths of Ray's sockets must be short
        env = {**os.environ, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "run.py"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for path in (tmp_path / "out").iterdir() for line in path.read_text().splitlines()]
    llm = kvjax.load(model)
    params = [kvjax.SamplingParams(seed=i, temperature=0.7, max_new_tokens=16) for i in range(4)]
    both = [*llm.generate(["bado"] * 2, params[::2]), *llm.generate(["bado"] * 2, params[1::2])]
    expected = [both[i].text for i in (0, 2, 1, 3)]
    assert sorted((record["id"], record["text"]) for record in records) == list(enumerate(expected))
    assert len(set(expected)) == 4
    assert 15 <= len(example().splitlines()) <= 25
