# A hundred thousand broken contracts.

from random import Random

from tests.fuzzing import broken, read_or_told


def test_a_hundred_thousand_broken_contracts():
    for seed in range(100):
        rng = Random(f"long {seed}")
        for _ in range(1000):
            read_or_told(broken(rng))
