# Doors for trainers: the monitor of a run, and the hooks of TRL and verl.
