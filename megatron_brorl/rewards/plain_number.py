r"""Read plain numbers exactly: integers, decimals, fractions, mixed fractions, percent, powers of ten, with units.

`1,234`, `$1234`, `\boxed{1234.0}`, `1.234 \times 10^3`, `x = 1234` and `1234 apples` are one number; `1/3` and
`0.333` are two. Units are compared as text, and never converted.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from megatron_brorl.rewards.answer_text import THIN, tidy

Unit = dict[str, int]  # symbol -> power

MAX_CHARS = 200  # A longer text is not a plain number.
_MAX_EXPONENT = 1000

_GROUPED = rf"\d{{1,3}}(?:,\d{{3}})+|\d{{1,3}}(?:{THIN}\d{{3}})+"
_DECIMAL = rf"(?:(?:{_GROUPED}|\d+)(?:\.\d*)?|\.\d+)"
_REPEATING = r"(?P<fixed>\d*\.\d*)\\overline\s*\{\s*(?P<period>\d+)\s*\}"
_LATEX_FRACTION = r"\\frac\s*(?:\{{\s*(?P<{0}>{1})\s*\}}|(?P<{0}1>\d))\s*(?:\{{\s*(?P<{2}>{1})\s*\}}|(?P<{2}1>\d))"
_CORE = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?P<money>\$|€|£|¥|US\$)?\s*(?P<sign2>-?)\s*(?:
      {_REPEATING}
    | (?:(?P<whole>\d+)\s*)?{_LATEX_FRACTION.format("top", f"-?{_DECIMAL}", "bottom")}
    | (?:(?P<whole2>\d+)\s+)?(?P<top2>{_DECIMAL})\s*/\s*(?P<bottom2>{_DECIMAL})(?![\d/])
    | 10\s*\^\s*(?:\{{\s*(?P<only>[-+]?\d{{1,4}})\s*\}}|(?P<only1>-?\d{{1,4}}))
    | (?P<decimal>{_DECIMAL})(?:[eE](?P<e>[-+]?\d{{1,4}})(?![\w.])
        |\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{{\s*(?P<ten>[-+]?\d{{1,4}})\s*\}}|(?P<ten1>-?\d{{1,4}})))?
    )""",
    re.VERBOSE,
)
# The name of a value: a letter with its index and arguments, a line AB, a Greek letter, or words.
_GREEK = r"\\(?:alpha|beta|gamma|delta|theta|phi|lambda|mu|rho|sigma|tau|omega)\b\s*|\\angle\s*[A-Z]{1,3}"
_WORDS_NAME = r"(?!(?:sin|cos|tan|log|exp|sqrt|not)\b)[A-Za-z']{3,}(?: +[A-Za-z']+){0,7}"
NAME = (
    rf"(?:{_WORDS_NAME}|[A-Z]{{1,3}}|[a-z]|{_GREEK})"
    r"(?:_\{?[A-Za-z0-9]{1,12}\}?)?'*(?:\([A-Za-z0-9,+ -]{1,20}\))?"
)
_VARIABLE = re.compile(r"(?:[a-z]|alpha|beta|gamma|delta|theta|phi|lambda|mu|rho|sigma|tau|omega)(?:_\{?\w+\}?)?")
_LEAD = re.compile(
    rf"(?:(?P<name>{NAME})?\s*(?:=|:|\\approx)\s*)?"
    r"(?:(?:exactly|only|about|approximately|around|roughly|\\approx|a total of)\s+)?"
)
_PERCENT = re.compile(r"\s*(?:%|percent\b|per cent\b|percentage points\b)", re.IGNORECASE)
_MULTIPLIERS = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MULTIPLIER = re.compile(rf"\s*({'|'.join(_MULTIPLIERS)})s?\b", re.IGNORECASE)
_WORDS = re.compile(r"(?:[A-Za-z]{3,}|a|an|of|in|on|at|by|per|is|it|he|up)(?:(?:'s|s')|-[A-Za-z]+)?(?:[ ,]+|$)")
_MAX_WORDS = 10
# Words that change a number: another number, an operation, or a change of mind.
CHANGES_NUMBER = re.compile(
    r"\b(?:or|and|not|but|plus|minus|divided|multiplied|squared|cubed|factorial|root|power|modulo|mod|half|halves|"
    r"thirds?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?|thousandths?|percent|"
    r"zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty|forty|fifty|sixty|"
    r"seventy|eighty|ninety|hundreds?|dozens?|thousands?|millions?|billions?|trillions?|sin|cos|tan|log|exp|sqrt|"
    r"base|binary|octal|hexadecimal|maybe|perhaps|wrong|false|instead)\b",
    re.IGNORECASE,
)
# A symbol and its other names, without the s of a plural.
_NAMES = """
mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|nm nanometer nanometre
in inch inche|ft foot feet|yd yard|mi mile|mg milligram|g gram gramme|kg kilogram kilogramme|lb pound|oz ounce
s sec second|ms millisecond|min minute|h hr hour|day|week|month|year yr
L l liter litre|mL ml milliliter millilitre|gal gallon
Hz hertz|N newton|Pa pascal|kPa kilopascal|atm atmosphere|J joule|kJ kilojoule|eV electronvolt|W watt|kW kilowatt
V volt|A amp ampere|C coulomb|Ω ohm|F farad|T tesla|mol mole|M molar|cal calorie|kcal|K kelvin
$ dollar usd|€ euro eur|£ gbp|¥ yen|cent|° degree deg|rad radian|mph
"""
_SYMBOLS = {
    name: names.split()[0]
    for line in _NAMES.strip().splitlines()
    for names in line.split("|")
    for name in names.split()
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_UNIT_WORD = re.compile(
    r"\s*(?:(?P<word>[A-Za-z]+|[$€£¥°Ωµμ])(?:\s*\^\s*\{?\s*(?P<power>-?\d)\s*\}?)?|(?P<mark>[/*.()]))"
)


class PlainNumber(NamedTuple):
    """A number with what can change its value."""

    value: Fraction  # 10 for "10%"
    percent: bool = False
    unit: Unit | None = None  # None: there is none, or the words are not a unit
    name: str = ""  # x in "x = 10"


def plain_number(text: str) -> PlainNumber | None:
    """Return the number that a text is, or None for anything else, such as an expression or two numbers."""
    if len(text) > MAX_CHARS:
        return None
    text = tidy(text)
    if text.startswith("(") and text.endswith(")") and "," not in text:  # (1,234) may be a pair
        text = text[1:-1].strip()

    lead = _LEAD.match(text)
    core = _CORE.match(text, lead.end() if lead else 0)
    if not core or (core["sign"] and core["sign2"]):
        return None
    value = _value(core)
    after = _after(text[core.end() :])
    if value is None or after is None:
        return None

    # Money before the number is a unit too.
    factor, percent, measured = after
    if core["money"]:
        measured = {core["money"][-1]: 1, **(measured or {})}
    negative = bool(core["sign"] == "-" or core["sign2"])
    name = lead["name"] if lead else None
    return PlainNumber((-value if negative else value) * factor, percent, measured, (name or "").replace("\\", ""))


def equal(a: PlainNumber, b: PlainNumber) -> bool:
    """Return whether the values are equal. If only one of them has a percent sign, `10%` equals both 10 and 0.1."""
    if a.percent == b.percent:
        return a.value == b.value
    of_hundred, other = (a, b) if a.percent else (b, a)
    return other.value in (of_hundred.value, of_hundred.value / 100)


def units_clash(a: Unit | None, b: Unit | None) -> bool:
    """Return whether both are units and neither is a part of the other, as `dollars` is of `dollars per day`."""
    return a is not None and b is not None and not (a.items() <= b.items() or b.items() <= a.items())


def names_clash(a: str, b: str) -> bool:
    """Return whether two names are different variables. Words and capitals are labels: `S = 3` may answer `x = 3`."""
    return a != b and bool(_VARIABLE.fullmatch(a) and _VARIABLE.fullmatch(b))


def _value(core: re.Match[str]) -> Fraction | None:
    """Return the number of a match without its sign."""
    # A period is divided by as many nines, behind the digits before it.
    if core["period"]:
        fixed, period = core["fixed"], core["period"]
        shift = 10 ** len(fixed.partition(".")[2])
        return _fraction("0" + fixed + "0") + Fraction(int(period), (10 ** len(period) - 1) * shift)

    # A mixed fraction has a whole number before a proper fraction.
    top = core["top"] or core["top1"] or core["top2"]
    if top:
        bottom = _fraction(core["bottom"] or core["bottom1"] or core["bottom2"])
        if not bottom:
            return None
        part, whole = _fraction(top) / bottom, core["whole"] or core["whole2"]
        if whole is None:
            return part
        return int(whole) + part if 0 < part < 1 else None

    exponent = int(core["e"] or core["ten"] or core["ten1"] or core["only"] or core["only1"] or 0)
    if abs(exponent) > _MAX_EXPONENT:
        return None
    return _fraction(core["decimal"] or "1") * Fraction(10) ** exponent


def _fraction(digits: str) -> Fraction:
    digits = digits.replace(",", "").replace(THIN, "")
    sign = -1 if digits.startswith("-") else 1
    whole, _, decimals = digits.removeprefix("-").partition(".")
    return sign * Fraction(int(whole + decimals or "0"), 10 ** len(decimals))


def _after(text: str) -> tuple[int, bool, Unit | None] | None:
    """Return the factor, such as that of `million`, whether it is percent, and the unit; None for any other text."""
    factor, percent = 1, False
    if match := _MULTIPLIER.match(text):
        factor, text = _MULTIPLIERS[match[1].lower()], text[match.end() :]
    elif match := _PERCENT.match(text):
        percent, text = True, text[match.end() :]

    # A unit may follow without a space, `12cm`. Other words and single letters may not, `12x`.
    if not text.strip():
        return factor, percent, None
    if re.match(r"[A-Za-z](?![A-Za-z])", text):
        return None
    measured = unit(text)
    if measured:
        return factor, percent, measured
    if not text[:1].isspace():
        return None
    return (factor, percent, None) if only_words(text.strip()) else None


def only_words(text: str) -> bool:
    """Return whether a text is a few words that do not change a number."""
    at = 0
    for _ in range(_MAX_WORDS):
        word = _WORDS.match(text, at)
        if not word:
            return False
        at = word.end()
        if at == len(text):
            return not CHANGES_NUMBER.search(text)
    return False


def unit(text: str) -> Unit | None:
    """Return the unit that a tidied text is, or None."""
    text = text.replace("\\cdot", "*").replace("\\times", "*").replace("\\Omega", "Ω").strip()
    powers: Unit = {}
    sign, factor, at = 1, 1, 0
    last = ""
    while at < len(text):
        token = _UNIT_WORD.match(text, at)
        if not token:
            return None
        at = token.end()
        word = token["word"]
        if token["mark"] == "/" or word == "per":
            sign = -1
        elif word in _POWERS:
            factor = _POWERS[word]
        elif word in ("squared", "cubed") and last:
            powers[last] *= 2 if word == "squared" else 3
        elif word:
            last = _symbol(word)
            if not last:
                return None
            powers[last] = powers.get(last, 0) + sign * factor * int(token["power"] or 1)
            factor = 1
    return {name: power for name, power in powers.items() if power} or None


def _symbol(word: str) -> str:
    """Return the symbol of one unit, or "". Case matters in symbols, not in names."""
    if word in _SYMBOLS:
        return _SYMBOLS[word]
    name = word.lower()
    if len(name) < 3:
        return ""
    return _SYMBOLS.get(name) or _SYMBOLS.get(name.removesuffix("s"), "")
