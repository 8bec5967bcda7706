# Mutation: does any test notice that a limit moved, or that a kernel is faulty?

from servanda.mutation.mutants import Mutant, mutants
from servanda.mutation.mutate import mutate
from servanda.mutation.result import (
    Conforming,
    Failing,
    Injected,
    Mutation,
    Near,
    Tried,
)

__all__ = [
    "Conforming",
    "Failing",
    "Injected",
    "Mutant",
    "Mutation",
    "Near",
    "Tried",
    "mutants",
    "mutate",
]
