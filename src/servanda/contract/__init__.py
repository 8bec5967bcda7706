# The contract: its language, from a YAML text to frozen values with a place each.
