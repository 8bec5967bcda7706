# Lint: what one part of a contract means for another, a module for each part.
