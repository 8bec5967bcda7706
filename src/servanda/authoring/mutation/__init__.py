# Mutation: does any test notice that a limit moved, or that a kernel is faulty?
