from tests.field import data, kernels, mixtures, sync  # noqa: F401 - each enters its rows
from tests.field.rows import ROWS

__all__ = ["ROWS"]
