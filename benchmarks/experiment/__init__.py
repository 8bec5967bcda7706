# What a kernel contract buys in real training: the records of docs/explanation/experiment.md, and
# the page, its tables and pictures from them.
