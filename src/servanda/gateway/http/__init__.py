# What strangers reach: the listener of a gateway and of its controller, keys, limits, refusals.
