"""Text as models write it, brought to one alphabet and one dialect of LaTeX."""
# ruff: noqa: RUF001 - look-alike characters are what this file is about

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-")
_GREEK = "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"
_GREEK_NAMES = """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi
chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"""
_WRITTEN = {
    **dict.fromkeys("−–—‒‐‑﹣－", "-"),
    **{letter: f"\\{name} " for letter, name in zip(_GREEK, _GREEK_NAMES.split(), strict=True)},
    "×": "\\times ", "✕": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "∙": "\\cdot ", "÷": "/", "∕": "/", "⁄": "/",
    "≤": "\\leq ", "⩽": "\\leq ", "≥": "\\geq ", "⩾": "\\geq ", "≠": "\\neq ", "≈": "\\approx ", "∈": "\\in ",
    "∞": "\\infty ", "∪": "\\cup ", "∩": "\\cap ", "∅": "\\emptyset ", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}",
    "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}", "√": "\\sqrt ", "∛": "\\sqrt[3]", "±": "\\pm ",
    "∓": "\\mp ", "°": "^\\circ ", "º": "^\\circ ", "…": "\\ldots ", "⟨": "\\langle ", "⟩": "\\rangle ", "′": "'",
    "“": '"', "”": '"', "‘": "'", "’": "'", "٫": ".", "٬": ",", "،": ",", "，": ",", "﹪": "%", "٪": "%",
}  # fmt: skip
_VULGAR = {c: unicodedata.normalize("NFKC", c).replace("⁄", "/") for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"}
_UNUSUAL = re.compile(r"[^\n\t -~]")


def plain(text: str) -> str:
    """`text` in ASCII wherever that keeps its meaning.

    Digits of any script become ASCII digits, dashes before numbers a hyphen, symbols their LaTeX commands. What is not
    seen (zero width, direction marks) is dropped; control characters and half surrogates separate.
    """
    if not _UNUSUAL.search(text):
        return text
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda run: f"^{{{run[0].translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋]+", lambda run: f"_{{{run[0].translate(_SUBSCRIPTS)}}}", text)
    return "".join(c if " " <= c <= "~" or c in "\n\t" else _one(c) for c in text)


def _one(character: str) -> str:
    if character in _WRITTEN:
        return _WRITTEN[character]
    if character in _VULGAR:
        return f" {_VULGAR[character]}"
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    kind = unicodedata.category(character)
    if kind == "Cf":
        return ""
    if kind in ("Zs", "Zl", "Zp"):
        return " "
    if kind[0] == "C":
        return " \ufffd " if kind == "Cs" else " "
    return unicodedata.normalize("NFKC", character)


_GONE = re.compile(
    r"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|boldmath|rm|bf|it)(?![a-zA-Z])\.?"
    r"|\\!|\{\}|\\hfill|\\(?:phantom|hspace\*?|vspace\*?|label|tag)\{[^{}]*\}"
)
_SPACE = re.compile(r"\\[,;:> ]|~|\\(?:q?quad|enspace|thinspace|space|newline)(?![a-zA-Z])|\s+")
_DELIMITERS = re.compile(r"\\[()\[\]]|(?<!\\)\$")
_TEXTS = re.compile(r"\\(?:text(?:rm|bf|it|sf|tt|normal|up|sc)?|[mh]box|math(?:rm|sf|tt)|operatorname\*?)\s*(?=\{)")
_FONTS = re.compile(r"\\(?:math(?:bf|it|cal|normal)|boldsymbol|bm|pmb|vec|emph|underline)\s*(?=[{a-zA-Z\\])")
_LETTER_TEXT = re.compile(r"\\text\{\s*([ei])\s*\}")
_SYNONYMS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", 
    "le": "leq", "leqslant": "leq", "leqq": "leq", "ge": "geq", "geqslant": "geq", "geqq": "geq", "ne": "neq",
    "lt": "<", "gt": ">", "infin": "infty", "varnothing": "emptyset", "lbrace": "\\{", "rbrace": "\\}", "lbrack": "[",
    "rbrack": "]", "div": "/", "ast": "*", "star": "*", "cdotp": "cdot", "colon": ":", "lvert": "|", "rvert": "|",
    "vert": "|", "R": "mathbb{R}", "Z": "mathbb{Z}", "degree": "^\\circ", "percent": "%", "dots": "ldots",
    "cdots": "ldots", "varphi": "phi", "varepsilon": "epsilon", "vartheta": "theta", "approxeq": "approx",
    "simeq": "approx", "bigcup": "cup", "imath": "i", "land": "wedge", "prime": "'",
    "textdollar": "$", "euro": "€", "pounds": "£", "bar": "overline",
}  # fmt: skip
_COMMAND = re.compile(r"\\([a-zA-Z]+)")


def _synonym(command: re.Match[str]) -> str:
    other = _SYNONYMS.get(command[1])
    if other is None:
        return command[0]
    return f"\\{other}" if other[0].isalpha() and other != "i" else other


def tidy(text: str) -> str:
    """One dialect: no spacing, sizes, fonts or delimiters; `\\text` for every text; `\\frac{a}{b}` in full."""
    text = re.sub(r"(?<=\d)(?:\{,\}|,\\!|\\,)(?=\d{3}(?!\d))", "", plain(text))
    if "\\" in text or "~" in text:
        text = text.replace("\\\\", "\x00").replace("\\$", "\x01").replace("\\%", "%").replace("\\#", "#")
        text = _GONE.sub("", text)
        text = re.sub(r"\{([^{}]{1,40})\\choose(?![a-zA-Z])([^{}]{1,40})\}", r"\\binom{\1}{\2}", text)
        text = re.sub(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))", "", text)
        text = _DELIMITERS.sub(" ", _TEXTS.sub(r"\\text", text))
        text = _LETTER_TEXT.sub(r"{\1}", _FONTS.sub("", text))
        text = _COMMAND.sub(_synonym, text).replace("\\_", "_").replace("\\&", " and ")
        text = re.sub(r"\\text\s*\{\s*\x01\s*\}", "\x01", _SPACE.sub(" ", text))
        text = text.replace("\x00", "\\\\").replace("\x01", "\\$")
        text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"^\\circ ", text)
        text = _full_arguments(text)
    else:
        text = _SPACE.sub(" ", _DELIMITERS.sub(" ", text))
    return text.strip()


_GROUP = r"\{[^{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*\}"
_ARGUMENT = r"\s*(\d|[a-zA-Z]|\\[a-zA-Z]+(?![a-zA-Z{]))"


def _full_arguments(text: str) -> str:
    """Braces round arguments of one character: `\\frac34` is `\\frac{3}{4}`."""
    text = re.sub(r"\\(frac|binom)" + _ARGUMENT, r"\\\1{\2}", text)
    text = re.sub(rf"(\\(?:frac|binom){_GROUP})" + _ARGUMENT, r"\1{\2}", text)
    return re.sub(r"\\sqrt((?:\s*\[[^\[\]]*\])?)" + _ARGUMENT, r"\\sqrt\1{\2}", text)


def squeeze(text: str) -> str:
    """`text` without spaces, needless braces and a final full stop: equal squeezed texts are equal answers.

    Spaces stay between letters and between digits: `1 1/2` is not `11/2`.
    """
    text = re.sub(r"\s+", lambda gap: " " if _is_kept(gap) else "", text)
    text = re.sub(r"(?<![\w\\}\]\^.])\{([^{}\\]|\d+)\}", r"\1", text)
    return re.sub(r"([\^_])\{([^{}\\])\}", r"\1\2", text).rstrip(".,;").strip()


def _is_kept(gap: re.Match[str]) -> bool:
    around = gap.string[gap.start() - 1 : gap.start()] + gap.string[gap.end() : gap.end() + 1]
    return len(around) == 2 and (around.isalpha() or all(c.isdigit() or c == "." for c in around))
