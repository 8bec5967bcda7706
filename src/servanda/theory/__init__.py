# Theory: divergences, bounds and sequential statistics.  Pure: numbers in, numbers out.
