# The public listener of a gateway and its controller: keys, limits, error replies.
