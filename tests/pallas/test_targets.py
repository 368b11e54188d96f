import pytest

from pallas_kernels.targets import missing


@pytest.mark.parametrize(("required", "outcome"), [("required", pytest.fail), ("", pytest.skip)])
def test_without_a_compiler_tests_are_skipped_unless_it_is_required(monkeypatch, request, required, outcome):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("GPU_COMPILE", required)
    assert missing()
    with pytest.raises(outcome.Exception):
        request.getfixturevalue("compile_for_h200")
