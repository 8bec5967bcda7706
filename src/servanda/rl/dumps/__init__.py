# Dumps: from what a trainer wrote of its steps to a verdict.
