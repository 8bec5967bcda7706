# The bound chain of a contract: the implications of each number, one theorem at a time.
