"""The README's Python examples run as they stand, one after the other."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_examples(capsys):
    examples = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) >= 2
    namespace = {}
    for example in examples:
        exec(compile(example, str(README), "exec"), namespace)
    # The gradient of a sum of squares is not trivial, and explain names both derivative products.
    assert abs(namespace["dw"]).sum() > 0
    printed = capsys.readouterr().out
    assert "ragged_noncontracting" in printed and "ragged_contracting" in printed
