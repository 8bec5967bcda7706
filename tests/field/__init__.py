from tests.field import data, kernels, sync  # noqa: F401 - each enters its rows
from tests.field.rows import ROWS

__all__ = ["ROWS"]
