# Routing: which pool serves a live request, and how a slice leaves infer and comes back.  Pure.
