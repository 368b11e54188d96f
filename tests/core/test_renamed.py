"""Old names of public attributes."""

from dataclasses import dataclass, fields

import pytest

from jaxserve.core.renamed import Renamed


@dataclass(frozen=True)
class Window:
    max_wait: float
    longest_wait = Renamed("max_wait")


def test_renamed_attribute_gives_the_new_one_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="Window.longest_wait is deprecated: use max_wait"):
        assert Window(2.0).longest_wait == 2.0


def test_renamed_attribute_is_not_a_dataclass_field() -> None:
    assert [field.name for field in fields(Window)] == ["max_wait"]
