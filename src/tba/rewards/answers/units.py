"""Units beside a number: split off, compared by kind, never converted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from tba.rewards.answers.numbers import DECIMAL, Number, number

MAX_TEXT = 300
"""Characters beyond which a text is no number with a unit."""

_KINDS = {
    "%": "% percent percents pct percentage",
    "degree": "degree degrees deg",
    "dollar": "dollar dollars usd buck bucks",
    "cent": "cent cents",
    "euro": "euro euros eur",
    "pound sterling": "gbp",
    "yen": "yen jpy",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm cms centimeter centimeters centimetre centimetres",
    "dm": "dm decimeter decimeters",
    "m": "m meter meters metre metres",
    "km": "km kms kilometer kilometers kilometre kilometres",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mile": "mi mile miles",
    "mg": "mg milligram milligrams",
    "g": "g gram grams",
    "kg": "kg kgs kilogram kilograms",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "ton": "ton tons tonne tonnes",
    "ml": "ml milliliter milliliters millilitre millilitres",
    "l": "l liter liters litre litres",
    "gal": "gal gallon gallons",
    "ms": "ms millisecond milliseconds",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "yr yrs year years",
    "mph": "mph",
    "radian": "rad radian radians",
    "hertz": "hz hertz",
    "newton": "newton newtons",
    "joule": "joule joules",
    "watt": "watt watts",
    "volt": "volt volts",
    "ohm": "ohm ohms",
    "unit": "unit units",
}
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_AS_LETTERS = {"m", "s", "g", "l", "h", "in", "c", "f", "rad", "a"}
"""Units that are variables or words when they stand bare in mathematics."""
_BEFORE = re.compile(
    r"(?:(?:US|A|C)?\\\$|US(?=\s*\d)|(?:\\text\{\s*)?(?:USD|Rs\.?|INR|EUR|GBP)(?:\s*\})?|[€£¥₹₩₽₱])\s*"
)
_SIGNED_CURRENCY = re.compile(r"([-+])\s*(?=(?:US)?(?:\\\$|[€£¥₹₩₽₱]))")
_TRAILING = re.compile(
    r"\s*(?P<percent>%|\\text\{\s*%\s*\})$"
    r"|\s*(?P<degree>\^\\circ)\s*(?P<scale>[CF]|\\text\{\s*[CF]\s*\})?$"
    r"|\s*(?P<text>(?:\\text\{[^{}]*\}[\s/.]*(?:\^\{?-?\d\}?)?\s*)+)$"
    r"|(?<=[\d}).])\s*(?P<bare>[a-zA-Z.]+(?:\s*/\s*[a-zA-Z]+|\s+[a-zA-Z]+)*\s*(?:\^\{?\d\}?)?|(?:[mck]?m|ft|in|yd)[23])$"
    r"|(?<=\d)\s*(?P<currency>\\\$|[€£¥₹₩₽₱])$"
)
_PREFIXED = {"$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "USD": "dollar", "EUR": "euro"}


@cache
def _kinds() -> dict[str, str]:
    return {word: kind for kind, words in _KINDS.items() for word in words.split()}


@dataclass(frozen=True, slots=True)
class Measure:
    """A text and the unit that stood beside it."""

    core: str
    unit: str = ""
    """`%`, a known kind such as `cm^2`, or nothing when there was none or its words are unknown."""
    power: int = 0
    """Of ten, from a word such as million."""


def kind(words: str) -> str:
    """`square inches` and `in^2` are of one kind; words that are no unit known here are of none."""
    words = re.sub(r"\\text|[{}\\]", " ", words).lower().replace("per cent", "percent").strip(" .")
    words = re.sub(r"\s*/\s*|\s+per\s+", " / ", words)
    exponent = re.search(r"\^?\s*(\d)\s*$", words)
    power = int(exponent[1]) if exponent else 1
    words = re.sub(r"\^?\s*\d\s*$", "", words)
    found: list[str] = []
    for word in words.split():
        if word in ("square", "sq", "sq.", "cubic", "cu", "cu."):
            power = 2 if word.startswith("s") else 3
        elif word == "/":
            found.append("/")
        elif (known := _kinds().get(word.strip("."))) is not None:
            found.append(known)
    name = " ".join(found).strip("/ ")
    return f"{name}^{power}" if name and power > 1 else name


def split_unit(text: str, *, takes_words: bool = False) -> Measure:
    """What is left of `text` without its unit; `takes_words` also drops bare words that are no known unit."""
    unit, power = "", 0
    text = _SIGNED_CURRENCY.sub(r"\1", text.strip())
    before = _BEFORE.match(text)
    if before is not None and before.end() < len(text):
        sign = re.sub(r"\\text|[{} .]", "", before[0])
        unit, text = _PREFIXED.get(sign, _PREFIXED.get(sign[-1], "")), text[before.end() :]
    for _ in range(4):
        text = text.rstrip(" .,;")
        found = _TRAILING.search(text)
        if found is None or not (core := text[: found.start()].strip()):
            break
        if found["degree"] and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", core):
            break  # the angle's, not the answer's
        words = found["text"] or found["bare"] or ""
        if found["bare"] and not (_is_bare_unit(words) or (takes_words and _is_word(words))):
            break
        scale = re.match(r"(?:\\text\{)?\s*(hundred|thousand|million|billion|trillion)\b", words)
        if scale is not None:
            power += _SCALES[scale[1]]
        unit = _unit_of(found, words) or unit
        text = core
    return Measure(text, unit, power)


def _unit_of(found: re.Match[str], words: str) -> str:
    if found["percent"]:
        return "%"
    if found["degree"]:
        return "degree"
    if found["currency"]:
        return _PREFIXED.get(found["currency"][-1], "")
    return kind(words)


def _is_word(words: str) -> bool:
    """Of prose rather than of a formula: `12 x` is a product, `12 m` twelve metres."""
    first = re.findall(r"[a-zA-Z]+", words)[:1]
    return bool(first) and (len(first[0]) > 1 or first[0].lower() in _AS_LETTERS or " " in words.strip())


def _is_bare_unit(words: str) -> bool:
    parts = re.findall(r"[a-zA-Z]+", words)
    if len(parts) == 1 and (parts[0].lower() in _AS_LETTERS or len(parts[0]) == 1):
        return False
    known = {*_kinds(), *_SCALES, "per", "square", "sq", "cubic", "cu", "cent", "st", "nd", "rd", "th"}
    return all(part.lower() in known for part in parts)


_ORDINAL = re.compile(rf"({DECIMAL})\s*(?:\^?\s*\{{?\s*(?:\\text\{{)?\s*(?:st|nd|rd|th)\s*\}}?\s*\}}?)")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and its unit."""

    value: Number
    unit: str = ""


def quantity(text: str, *, takes_words: bool = False) -> Quantity | None:
    """The number with its unit that `text` is, or None."""
    value = number(text)
    if value is not None or len(text) > MAX_TEXT:
        return None if value is None else Quantity(value)
    ordinal = _ORDINAL.fullmatch(text.strip())
    measure = split_unit(ordinal[1] if ordinal else text, takes_words=takes_words)
    core = measure.core
    value = number(f"{core}e{measure.power}" if measure.power else core)
    return None if value is None else Quantity(value, measure.unit)


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Exactly equal numbers, in units that do not contradict each other.

    A unit on one side only is ignored. So is a percent sign, which may also mean its hundredth: 15% is 15, and 0.15.
    """
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if gold.value == answer.value:
        return True
    if (gold.unit == "%") == (answer.unit == "%") or not isinstance(gold.value, type(answer.value)):
        return False
    return _hundredth(gold) == _hundredth(answer)


def _hundredth(given: Quantity) -> Number:
    return given.value / 100 if given.unit == "%" and isinstance(given.value, Fraction) else given.value
