import shutil

import pytest

from jaxserve.kernels import native
from jaxserve.kernels.native.build import build


@pytest.fixture(scope="session")
def native_kernels():
    """The native kernels, built now if need be; skips where there is no compiler."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    build()
    assert native.targets()
    return native
