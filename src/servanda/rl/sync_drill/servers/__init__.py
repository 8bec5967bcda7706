# Live servers as the engines of a preflight sync test: each URL is a replica of its own.
