# The versions of a trainer's packages: supported or refused, and the build of its engine.

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from servanda.errors import MeasurementError


def installed(package: str) -> str:
    """The version of a package; "" if it is not installed, or has no name."""
    try:
        return version(package) if package else ""
    except PackageNotFoundError:
        return ""


def built(package: str) -> str:
    """A package with its version, such as "vllm 0.32.0"; "" if it is not installed."""
    found = installed(package)
    return f"{package} {found}" if found else ""


def check_version(
    package: str, name: str, supported: tuple[tuple[int, int], tuple[int, int]], tested: str
) -> None:
    """Refuse a version whose batches may mean something else.

    Args:
        name: of the package, for people.
        supported: the first supported (major, minor), and the first that is not any more.
        tested: a version that works.

    Raises:
        MeasurementError: it is older or newer.
    """
    found, (first, end) = installed(package), supported
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and not first <= numbers < end:
        raise MeasurementError(
            f"{name} {found} is installed, and its batches may mean something else",
            hint=f"Servanda supports {name} {'.'.join(map(str, first))} to {end[0] - 1}.x, tested "
            f"with {tested}: pip install {package}=={tested}",
        )
