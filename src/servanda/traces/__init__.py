# Traces: what kernels did, token by token, and the files that it is kept in.  Pure.
