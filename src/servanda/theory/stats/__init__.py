# Sequential statistics, valid under continuous monitoring.
