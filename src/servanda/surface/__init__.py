# The surface of two servers: what a client meets before the kernels do.

from servanda.surface.finding import Finding, Layer, differs
from servanda.surface.looking import look

__all__ = ["Finding", "Layer", "differs", "look"]
