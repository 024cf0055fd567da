"""Bad input, reported in one sentence: what was given and what is wanted."""

from collections.abc import Iterable, Sequence
from numbers import Integral, Real


class InputError(ValueError):
    """A mistake in what the caller gave; its text is one sentence for a person."""


class OwnInputError(InputError):
    """A mistake that only this rank has met, in its part of the data."""


def check(condition: bool, message: str) -> None:
    """Raise ``InputError(message)`` unless the condition holds."""
    if not condition:
        raise InputError(message)


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """The value of an option must be one of a few."""
    choices = list(choices)
    check(value in choices, f"{name} is {value!r}, wanted one of {', '.join(map(repr, choices))}")


def check_range(name: str, value: float, low: float, high: float) -> None:
    """The value of an option must lie in a closed interval (NaN lies in none)."""
    check(
        isinstance(value, Real) and not isinstance(value, bool) and low <= value <= high,
        f"{name} is {value!r}, wanted a number from {low:g} to {high:g}",
    )


def check_count(name: str, value: int, least: int) -> None:
    """The value of an option must be a whole number, at least ``least``."""
    check(
        isinstance(value, Integral) and not isinstance(value, bool) and value >= least,
        f"{name} is {value!r}, wanted a whole number of at least {least}",
    )


def check_seed(seed: int, bits: int = 64) -> None:
    """A seed is a whole number of so many bits."""
    check_count("seed", seed, 0)
    check(seed < 2**bits, f"seed is {seed}, wanted one below 2**{bits}")


def some(names: Sequence[str]) -> str:
    """The first three of many names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
