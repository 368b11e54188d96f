"""The parts of `python -m bench.gpu`, each run in a process of its own.

Rows are flat dicts. A row that has a floor carries its `bytes`, `flops` and `dtype`; the table divides the floor's time
by the row's `seconds`.
"""

from typing import Any

Row = dict[str, Any]
