# The bound chain of a contract: what each of its numbers implies, one theorem at a time.
