"""What a kernel contract buys in real training: GRPO on the shipped model, with and without.

python -m benchmarks.experiment [--full] [--out FOLDER] [--only NAME ...]
"""
