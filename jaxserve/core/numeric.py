"""Arithmetic with whole numbers."""


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `n`."""
    return ceil_div(n, multiple) * multiple
