# How many examples a property draws where that is not the profile's own number.

from hypothesis import settings


def examples(n):
    """n in the default suite, where they are the same every time; twenty times as many at night."""
    return n if settings.default.derandomize else 20 * n
