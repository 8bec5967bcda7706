# Lint: consistency between the parts of a contract, a module for each part.
