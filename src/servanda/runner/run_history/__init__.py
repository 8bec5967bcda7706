"""Verdicts of many runs: read from a folder, side by side, and the newest against good ones."""
