"""Names of precisions, and assignments of precisions to layers."""

import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.core.precision import assignment_id, layer_precisions, parse_precision


@pytest.mark.parametrize(
    ("precision", "ranges", "expected"),
    [
        ("auto", None, ("bfloat16",) * 4),
        ("bf16", None, ("bfloat16",) * 4),
        ("int4", None, ("int4",) * 4),
        ("auto", "0-1:bf16,2-:int4", ("bfloat16", "bfloat16", "int4", "int4")),
        ("int8", " 3:int3 , 0-0:auto", ("bfloat16", "int8", "int8", "int3")),
        ("auto", "0-:int3", ("int3",) * 4),
    ],
)
def test_assignment_gives_every_layer_a_precision(
    precision: str, ranges: str | None, expected: tuple[str, ...]
) -> None:
    assert layer_precisions(precision, ranges, ("bfloat16",) * 4, "bfloat16") == expected


def test_auto_precision_is_the_checkpoints_dtype() -> None:
    stored = ("int4", "int4", "bfloat16")
    assert layer_precisions("auto", None, stored, "bfloat16") == stored
    assert layer_precisions("auto", "0:bf16", stored, "bfloat16") == ("bfloat16", "int4", "bfloat16")
    assert layer_precisions("bf16", None, stored, "bfloat16") == ("bfloat16",) * 3


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ("0-99:int4", "'0-99:int4': the model's 8 layers are 0-7"),
        ("8-:int4", "0-7"),
        ("3-1:int4", "0-7"),
        ("0-3:int5", "'int5': choose from auto, bfloat16, int8, int4, int3"),
        ("0-3:int4,2-5:int8", "names layer 2 twice"),
        ("0-3:fp16", "full precision is bfloat16 here"),
        ("", "it must be ranges as in"),
        ("0-3", "it must be ranges as in"),
        ("-3:int4", "it must be ranges as in"),
        ("0-3:int4,", "it must be ranges as in"),
        ("all:int4", "it must be ranges as in"),
    ],
)
def test_invalid_precision_assignment_is_refused(ranges: str, message: str) -> None:
    with pytest.raises(ConfigError, match="layer_precision") as caught:
        layer_precisions("auto", ranges, ("bfloat16",) * 8, "bfloat16")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_error_for_an_unknown_precision_names_the_option() -> None:
    with pytest.raises(ConfigError, match="variants is 'int2': choose from"):
        parse_precision("int2", "bfloat16", "variants")


def test_assignment_id_repeats_the_given_precisions() -> None:
    precisions = ("bfloat16", "bfloat16", "int4", "int8", "int8")
    name = assignment_id(precisions)
    assert name == "0-1:bfloat16,2-2:int4,3-4:int8"
    assert layer_precisions("auto", name, ("int3",) * 5, "bfloat16") == precisions
