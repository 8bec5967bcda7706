# The version of this package; the build reads it here, too.

__version__ = "0.1.0"
