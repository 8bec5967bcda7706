# The surface of two servers: what a client meets before the kernels do.

from servanda.surface.doors import Door
from servanda.surface.finding import Finding, Layer, differs
from servanda.surface.looking import look
from servanda.surface.text import conclusion, lines

__all__ = ["Door", "Finding", "Layer", "conclusion", "differs", "lines", "look"]
