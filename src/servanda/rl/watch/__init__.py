# Watching a run: a dump or a monitor's state is followed, and changes are reported.
