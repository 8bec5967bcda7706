# Change against good runs: how often healthy runs are called changed, measured on short real runs.
