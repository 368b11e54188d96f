import shutil

import pytest

from jaxserve.kernels import native


@pytest.fixture(scope="session")
def native_kernels():
    """The native kernels, compiled on first use; skips where there is no compiler."""
    if not native.targets() and shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    assert native.targets()
    assert native.library.variants()
    return native
