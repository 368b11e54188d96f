"""The parts of `python -m bench.gpu`, each run in its own process.

Rows are flat dicts. A row with a floor (the least time that it could take) carries its `bytes`, `flops` and `dtype`.
The table divides the floor by the row's `seconds`.
"""

from typing import Any

Row = dict[str, Any]
