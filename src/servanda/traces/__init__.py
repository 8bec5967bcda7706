# Traces: records of kernels, token by token, and their file formats.  Pure.
