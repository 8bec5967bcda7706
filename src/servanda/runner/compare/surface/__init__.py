# The API layer of two servers, above their kernels.
