"""The example in docs/data.md."""

import contextlib
import io
import re
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def test_the_worked_example_prints_what_it_says():
    """4, then 2, then 8 workers."""
    program, output = re.search(
        r"```python\n(from raycheck.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL
    ).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "docs/data.md", "exec"), {})
    assert printed.getvalue() == output
