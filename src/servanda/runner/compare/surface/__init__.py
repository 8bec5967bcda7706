# The surface of two servers: what a client meets before the kernels do.

from servanda.runner.compare.surface.compare import look
from servanda.runner.compare.surface.dialects import Door
from servanda.runner.compare.surface.difference import Finding, Layer, differs
from servanda.runner.compare.surface.text import conclusion, lines

__all__ = ["Door", "Finding", "Layer", "conclusion", "differs", "lines", "look"]
