"""The README's example runs as it stands, and its tables name what there is."""

import re
from pathlib import Path

import kvkern
from kvkern.backends import TABLE
from kvkern.integrations.transformers import SUPPORTED_MODEL_TYPES
from kvkern.layout import FORMAT_NAMES, CacheFormat

README = Path(__file__).parents[1] / "README.md"


def test_first_example_runs_as_it_stands(capsys):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    assert len(code.splitlines()) <= 16  # short enough to read at a glance
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed == "torch.Size([4, 16, 512]) torch.Size([4, 16])\n"


def test_tables_name_every_op_format_and_model():
    text = README.read_text()
    for op in TABLE:
        assert f"| `{op}` |" in text and hasattr(kvkern, op)
    for name in FORMAT_NAMES:
        row = next(line for line in text.splitlines() if re.match(rf"\|.*`{name}`.*\| \d+", line))
        assert f"| {CacheFormat(name).bytes_per_token} |" in row
    for model_type in SUPPORTED_MODEL_TYPES:
        assert f"`{model_type}`" in text
