"""Documents that are computed, not stored: sums with their steps, and small images and sounds.

The same ones on every machine: the random words are of a bit generator whose stream numpy promises for good. Sizes are
small, and what a model can learn of them is much, so a little of them in a mixture does not drown the text.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Callable

import numpy as np

_MATH_DOCUMENTS = 600
_MULTIMODAL_DOCUMENTS = 300


class _Draws:
    """Numbers of one document."""

    def __init__(self, number: int) -> None:
        self._bits = np.random.Philox(key=number)

    def below(self, bound: int) -> int:
        return int(self._bits.random_raw()) % bound

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)


@functools.cache
def math() -> tuple[bytes, ...]:
    """Arithmetic worked out step by step, in plain text: each document has a few tasks of one kind."""
    return tuple(_math_document(number) for number in range(_MATH_DOCUMENTS))


@functools.cache
def multimodal() -> tuple[bytes, ...]:
    """PNG images of 24 x 24 grey pixels and WAV sounds of 1/20 second, in turns."""
    return tuple(
        _png(_Draws(number)) if number % 2 == 0 else _wav(_Draws(number)) for number in range(_MULTIMODAL_DOCUMENTS)
    )


def _math_document(number: int) -> bytes:
    draws = _Draws(number)
    title, task = _TASKS[number % len(_TASKS)]
    tasks = "\n\n".join(f"{index}. {task(draws)}" for index in range(1, draws.between(3, 6) + 1))
    return f"{title}\n\n{tasks}\n".encode()


def _sum(draws: _Draws) -> str:
    a, b = draws.between(10, 999), draws.between(10, 999)
    lines = [f"Compute {a} + {b}."]
    carry = 0
    for place, name in enumerate(("ones", "tens", "hundreds")):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        lines.append(f"{name}: {x} + {y} + {carry} = {total}, write {total % 10}, carry {total // 10}")
        carry = total // 10
    return "\n".join([*lines, f"So {a} + {b} = {a + b}."])


def _product(draws: _Draws) -> str:
    a, b = draws.between(11, 99), draws.between(11, 99)
    tens, ones = b // 10 * 10, b % 10
    return (
        f"Compute {a} * {b}.\n{b} = {tens} + {ones}\n{a} * {tens} = {a * tens}\n{a} * {ones} = {a * ones}\n"
        f"{a * tens} + {a * ones} = {a * b}\nSo {a} * {b} = {a * b}."
    )


def _equation(draws: _Draws) -> str:
    a, x, b = draws.between(2, 12), draws.between(-20, 20), draws.between(1, 50)
    c = a * x + b
    return (
        f"Solve {a}x + {b} = {c}.\nSubtract {b} on both sides: {a}x = {c - b}.\nDivide by {a}: x = {x}.\n"
        f"Check: {a} * {x} + {b} = {a * x} + {b} = {c}."
    )


def _divisor(draws: _Draws) -> str:
    a, b = draws.between(20, 400), draws.between(20, 400)
    lines = [f"Find the greatest common divisor of {a} and {b}."]
    x, y = a, b
    while y:
        lines.append(f"{x} = {x // y} * {y} + {x % y}")
        x, y = y, x % y
    return "\n".join([*lines, f"So gcd({a}, {b}) = {x}."])


def _derivative(draws: _Draws) -> str:
    a, n, b, c = draws.between(2, 9), draws.between(2, 6), draws.between(2, 9), draws.between(1, 9)
    power = f"{a * n}x^{n - 1}" if n > 2 else f"{a * n}x"
    return (
        f"Let f(x) = {a}x^{n} + {b}x + {c}.\nThe derivative of {a}x^{n} is {a} * {n} * x^{n - 1} = {power}.\n"
        f"The derivative of {b}x is {b}, that of {c} is 0.\nSo f'(x) = {power} + {b}."
    )


_TASKS: tuple[tuple[str, Callable[[_Draws], str]], ...] = (
    ("Adding numbers digit by digit", _sum),
    ("Products of two numbers", _product),
    ("Linear equations", _equation),
    ("Greatest common divisors", _divisor),
    ("Derivatives of polynomials", _derivative),
)


def _png(draws: _Draws) -> bytes:
    """A rectangle on a gradient, 8-bit grey, not compressed: a byte a pixel, and the same on every machine."""
    size = 24
    left, top = draws.below(size // 2), draws.below(size // 2)
    right, bottom = draws.between(left + 4, size), draws.between(top + 4, size)
    step, shade = draws.between(1, 8), draws.below(256)
    image = np.tile(np.arange(size, dtype=np.uint8) * np.uint8(step), (size, 1))
    image[top:bottom, left:right] = shade
    # A row of PNG begins with the number of its filter; 0 is none.
    rows = b"".join(b"\0" + row.tobytes() for row in image)
    header = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, level=0)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _wav(draws: _Draws) -> bytes:
    """A square wave that changes its pitch once, 8000 samples a second of 8 bits."""
    rate, count = 8_000, 400
    periods, low, high = (draws.between(8, 60), draws.between(8, 60)), draws.between(60, 120), draws.between(136, 196)
    time = np.arange(count)
    period = np.where(time < count // 2, *periods)
    samples = np.where(time % period < period // 2, high, low).astype(np.uint8).tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, rate, 1, 8)
    data = struct.pack("<4sI", b"data", count) + samples
    return struct.pack("<4sI4s", b"RIFF", 4 + len(form) + len(data), b"WAVE") + form + data
