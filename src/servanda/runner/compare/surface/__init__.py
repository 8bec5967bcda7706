# The API layer of two servers: what a client meets before the kernels do.
