"""The GSM8K rule of the paper's code, faults included, so that its numbers can be compared."""

from __future__ import annotations

import ctypes
import re

NO_NUMBER = -999999.222222
"""Stands for a text without a number; two such texts are equal."""

_NUMBER = re.compile(r"[-+]?\d+\.\d*|[-+]?\.\d+|[-+]?\d+e[-+]?\d+|[-+]?\d+")


def paper_number(text: str) -> float:
    """The last number of `text` once its commas are deleted, as float32.

    Tried in this order at each place: digits and a dot; a dot and digits; digits and an exponent; digits. So `1.5e3`
    is 3, `10-4` is -4, `1/2` is 2, and integers beyond 2**24 may equal their neighbours.
    """
    found = _NUMBER.findall(text.replace(",", ""))
    return ctypes.c_float(float(found[-1]) if found else NO_NUMBER).value
