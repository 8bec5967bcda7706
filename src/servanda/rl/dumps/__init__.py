# Dumps: from a trainer's rollout files to a verdict.
