"""The snippet of the README that shows the problem, and that it is solved."""

import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_phase import ops

README = Path(__file__).resolve().parents[1] / "README.md"
MARKS = r"<!-- exact rows -->\n```python\n(.*?)```\n<!-- exact rows end -->"


def printed(capsys) -> list[str]:
    (code,) = re.findall(MARKS, README.read_text("utf-8"), re.DOTALL)
    exec(compile(code, str(README), "exec"), {})
    return capsys.readouterr().out.splitlines()


def test_rows_are_exact_inside_the_block(capsys):
    ops.reset_served()
    assert printed(capsys)[1] == "exact_rows: []"
    served = ops.served()
    assert sum(served.kernels.values()) == 5 and not served.stock


@pytest.mark.cuda
def test_stock_has_the_problem(capsys):
    assert mx.default_device().type == mx.DeviceType.gpu
    line = printed(capsys)[0]
    assert line.startswith("stock: [") and line != "stock: []"
