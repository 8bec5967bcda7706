# Mutation: does any test notice that a limit moved, or that a kernel is faulty?

from servanda.authoring.mutation.mutants import Mutant, mutants
from servanda.authoring.mutation.result import Conforming, Failing, Injected, Mutation, Near, Tried
from servanda.authoring.mutation.run import mutate

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
