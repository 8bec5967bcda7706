# The command line: one file a verb.

from servanda.cli.main import main

__all__ = ["main"]
