# Change against good runs: the numbers of a step, the reference, and the chart of a run.
