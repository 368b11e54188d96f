"""One HTML page and its plots from results: `series` computes, `plots` draws, `page` writes.

matplotlib is loaded by this package alone, and through its `Figure` class: no state of pyplot is touched.
"""

from jaxserve.bench.report.page import write_report

__all__ = ["write_report"]
