# What runs on a GPU of its own: `make test-gpu`.  Elsewhere every test is skipped with the reason.

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True, scope="session")
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU: `make test-gpu` on a machine that has one")
    return "cuda"
