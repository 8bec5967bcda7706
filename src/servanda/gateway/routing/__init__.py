# Routing: the pool of a live request, and the diversion and return of slices.  Pure.
