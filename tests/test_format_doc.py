"""The reader in docs/format.md reads what raycheck writes, by what that page says alone."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.runtime import jobs
from tests.runtime.harness import LocalCluster

PAGE = Path(__file__).parent.parent / "docs" / "format.md"


@pytest.mark.parametrize("is_sharded", [False, True])
def test_the_reader_of_the_page_reads_a_checkpoint(tmp_path, is_sharded):
    """Two generations, two ranks; the last digest of the job is that of what the page's reader returns."""
    reader: dict = {}
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), reader)
    cluster = LocalCluster(str(tmp_path / "run"), interval_steps=1_000_000)
    try:
        for steps in (3, 5):
            config = {"steps": steps, "width": 32, "is_sharded": is_sharded}
            results = cluster.start(jobs.train_sharded, config, world_size=2).results()
    finally:
        cluster.close()
    tensors = reader["read_newest"](tmp_path / "run")
    names = [f"model.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")]
    order = [*names, *(f"optimizer.{name}.exp_avg" for name in names)]
    arrays = [np.ascontiguousarray(tensors[name]).view(np.float32)[..., 0] for name in order]
    assert jobs.digest_of(array.tobytes() for array in arrays) == results[0]["at_end"]
