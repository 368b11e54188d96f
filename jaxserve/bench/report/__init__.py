"""Reports: one HTML page with plots of results. `series` computes, `plots` draws, `page` writes.

Only this package loads matplotlib, and only through its `Figure` class, so pyplot's global state stays untouched.
"""

from jaxserve.bench.report.page import write_report

__all__ = ["write_report"]
