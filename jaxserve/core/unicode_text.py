"""Text that UTF-8 can hold."""

import re

SURROGATE = re.compile("[\ud800-\udfff]")


def valid_unicode(text: str) -> str:
    """Return a text in which each pair of surrogates is its character, and each other surrogate U+FFFD."""
    if text.isascii() or not SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
