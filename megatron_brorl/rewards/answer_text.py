r"""Normalise the text of answers, and parse plain numbers exactly.

A plain number is an integer, decimal, fraction, mixed fraction, percentage or power of ten, with an optional unit.
`1,234`, `$1234`, `\boxed{1234.0}`, `1.234 \times 10^3`, `x = 1234` and `1234 apples` are the same number. `1/3` and
`0.333` differ. Units are compared as text and never converted. All functions take time linear in the text.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

THIN = "\u2009"  # represents every kind of space that can separate groups of digits

# Each character is followed by the name of its LaTeX command.
_SYMBOLS_OF_LATEX = "\u00d7times ·cdot ⋅cdot πpi ∞infty ≤le ≥ge ≠ne ≈approx \u222acup ∩cap ∈in ∅emptyset ±pm √sqrt"
_CHARACTERS = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63", "-"),
    **dict.fromkeys("\u2044\u2215÷", "/"),
    **dict.fromkeys("\u2019\u2018\u02bc", "'"),
    **{symbol[0]: f"\\{symbol[1:]} " for symbol in _SYMBOLS_OF_LATEX.split()},
    **dict(zip("º。、", "°.,", strict=True)),
}
_SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b\u207f]+")

# LaTeX that prints nothing, and LaTeX that prints the same as another command.
_INVISIBLE = r"\left \right \middle \displaystyle \textstyle \limits \bigl \bigr \big \Big \!"
_EQUIVALENT = r"""
\dfrac=\frac \tfrac=\frac \cfrac=\frac \leq=\le \leqslant=\le \geq=\ge \geqslant=\ge \neq=\ne \lt=< \gt=> \vee=\lor
\land=\wedge \lbrace=\{ \rbrace=\} \lbrack=[ \rbrack=] \langle=( \colon=: \rangle=) \vert=| \lvert=| \rvert=| \imath=i
\varnothing=\emptyset \degree=° \%=% {,}=, \text{,}=,
"""
_SYNONYMS = {
    **dict.fromkeys(_INVISIBLE.split(), ""),
    **dict.fromkeys(["\\,", "\\;", "\\:", "\\ ", "~", "\\thinspace"], THIN),
    **dict.fromkeys(["\\quad", "\\qquad"], " "),
    **dict(synonym.split("=") for synonym in _EQUIVALENT.split()),
}
_COMMAND = re.compile(r"\\\\|\\text\{,\}|\{,\}|\\[A-Za-z]+|\\[,;:! %]|~")
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))")
_FONT = r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|mbox|hbox|emph|boxed|fbox|boldsymbol|bm)\s*"
_WRAPPED = re.compile(_FONT + r"\{((?:[^{}]|\{[^{}]*\})*)\}")
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]|`")
_BOLD = re.compile(r"(?<![\w)*])\*\*(?=\S)([^*]*)(?<=\S)\*\*(?![\w(*])")  # not 2**3, where ** is a power
_DOLLAR = re.compile(r"(?<!\\)\$")
# A pair in brackets, which are reversed at the open ends of an interval in some countries: ]0;1[ is (0,1).
_END = r"(?:[^\[\](),;]|\([^\[\](),;]*\))+"  # one item of the pair
_INTERVAL = re.compile(
    r"(?P<before>(?:^|[$({}=,;:]|\\(?:cup|cap|in|setminus|lor|\()(?![a-z])|\b(?:or|and)\b)\s*(?:\\left\s*)?)"
    rf"(?P<left>[\[\](])(?P<start>{_END})[,;](?P<end>{_END})(?P<right>[\[\])])"
)
_LEADING = " \t\r\n\u2009:*_"  # characters that are removed at the start of an answer, and _TRAILING at its end
_TRAILING = _LEADING + ".,;"

MAX_NUMBER_CHARS = 200  # longer texts are not parsed as plain numbers
_MAX_EXPONENT = 1000  # of a power of ten
_DECIMAL = rf"(?:(?:\d{{1,3}}(?:,\d{{3}})+|\d{{1,3}}(?:{THIN}\d{{3}})+|\d+)(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?P<money>\$|€|£|¥|US\$)?\s*(?P<sign2>-?)\s*(?:
      (?P<fixed>\d*\.\d*)\\overline\s*\{{\s*(?P<period>\d+)\s*\}}
    | (?P<whole>\d+\s*)?\\frac\s*(?P<top>\d|\{{\s*-?{_DECIMAL}\s*\}})\s*(?P<bottom>\d|\{{\s*{_DECIMAL}\s*\}})
    | (?P<whole2>\d+\s+)?(?P<top2>{_DECIMAL})\s*/\s*(?P<bottom2>{_DECIMAL})(?![\d/])
    | 10\s*\^\s*(?P<only>-?\d{{1,4}}|\{{\s*[-+]?\d{{1,4}}\s*\}})
    | (?P<decimal>{_DECIMAL})(?:[eE](?P<e>[-+]?\d{{1,4}})(?![\w.])
        |\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?P<ten>-?\d{{1,4}}|\{{\s*[-+]?\d{{1,4}}\s*\}}))?
    )""",
    re.VERBOSE,
)
# The name before "=": words, or a letter such as x, AB or \theta with an optional index and arguments.
GREEK = "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|rho|sigma|tau|phi|chi|psi|omega"
NAME = (
    r"(?:(?!(?:sin|cos|tan|log|exp|sqrt|not)\b)[A-Za-z']{3,}(?: +[A-Za-z']+){0,7}|[A-Z]{1,3}|[a-z]"
    rf"|\\(?:{GREEK}|mu)\b\s*|\\angle\s*[A-Z]{{1,3}})"
    r"(?:_\{?[A-Za-z0-9]{1,12}\}?)?'*(?:\([A-Za-z0-9,+ -]{1,20}\))?"
)
_VARIABLE = re.compile(rf"(?:[a-z]|{GREEK}|mu)(?:_\{{?\w+\}}?)?")
_LEAD = re.compile(
    rf"(?:(?P<name>{NAME})?\s*(?:=|:|\\approx)\s*)?"
    r"(?:(?:exactly|only|about|approximately|around|roughly|\\approx|a total of)\s+)?"
)
_MULTIPLIERS = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_AFTER = re.compile(
    r"(?:\s*(?:(?P<percent>%|percent\b|per cent\b|percentage points\b)"
    rf"|(?P<multiplier>{'|'.join(_MULTIPLIERS)})s?\b))?",
    re.IGNORECASE,
)
_WORD = r"(?:[A-Za-z]{3,}|a|an|of|in|on|at|by|per|is|it|he|up)(?:'s|s'|-[A-Za-z]+)?"
_FEW_WORDS = re.compile(rf"{_WORD}(?:[ ,]+{_WORD}){{0,9}}[ ,]*")
# Words that change the number before them: another number, an operation, or a correction.
CHANGES_NUMBER = re.compile(
    r"\b(?:or|and|not|but|plus|minus|divided|multiplied|squared|cubed|factorial|root|power|modulo|mod|half|halves|"
    r"thirds?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?|thousandths?|percent|"
    r"zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty|forty|fifty|sixty|"
    r"seventy|eighty|ninety|hundreds?|dozens?|thousands?|millions?|billions?|trillions?|sin|cos|tan|log|exp|sqrt|"
    r"base|binary|octal|hexadecimal|maybe|perhaps|wrong|false|instead)\b",
    re.IGNORECASE,
)

# _PART matches a part of an answer that consists of letters. They are text instead of a product if they match _CODE
# (ii, A1). They are also text if they match _NAMES (HTT, 1A, e4, ix) or _LOWER (on, its, was, tth), and the reference
# has such a part.
_PART = re.compile(
    r"(?P<before>(?:^|[,;]|\\(?:lor|cup|in)(?![a-z]))(?:[A-Za-z_' ]{1,40}=)?(?:\s|\\?[({\[])*)"
    r"(?P<letters>\\text\{[^{}]*\}|[A-Za-z0-9](?:[A-Za-z0-9\s*]|\\(?:cdot|times)(?![a-z]))*)"
    r"(?=(?:\s|\\?[)}\]])*(?:$|[,;]|\\(?:lor|cup)(?![a-z])))"
)
_CODE = re.compile(r"[Ii]{2,}|(?=\d*[A-Z]+\d)[A-Z\d]+")  # ii, 1A2
_NAMES = re.compile(r"[A-Z]{2,}|(?:0\d*|1)[A-Z]+|(?=\d*[A-Za-z]+\d)[A-Za-z\d]+|(?=[vxVX]*[Ii])[ivxIVX]{2,}")
_LOWER = re.compile(r"(?=.*[oO]|[eiEI]..|.[aeiu].|..[ei]|.*([a-z]).*\1|.{4})[A-Za-z][a-z]+")
_TIMES = re.compile(r"\\(?:cdot|times)(?![a-z])|\*")

Unit = dict[str, int]  # symbol -> power
# Each symbol is followed by its other names, in the singular.
_UNITS = r"""
mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|nm nanometer nanometre
in inch inche|ft foot feet|yd yard|mi mile|mg milligram|g gram gramme|kg kilogram kilogramme|lb pound|oz ounce
s sec second|ms millisecond|min minute|h hr hour|day|week|month|year yr
L l liter litre|mL ml milliliter millilitre|gal gallon
Hz hertz|N newton|Pa pascal|kPa kilopascal|atm atmosphere|J joule|kJ kilojoule|eV electronvolt|W watt|kW kilowatt
microm micrometer micrometre micron|microg microgram|micros microsecond|microL microl microliter microlitre
V volt|A amp ampere|C coulomb|Ω ohm \Omega|F farad|T tesla|mol mole|M molar|cal calorie|kcal|K kelvin
$ dollar usd|€ euro eur|£ gbp|¥ yen|cent|° degree deg|rad radian|mph
"""
_SYMBOLS = {name: names.split()[0] for row in _UNITS.splitlines() for names in row.split("|") for name in names.split()}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
_UNIT_WORD = re.compile(
    r"\s*(?:(?P<mark>[/*.()]|\\cdot|\\times)|(?P<word>\\?[A-Za-z]+|[$€£¥°Ωµμ])(?:\s*\^\s*\{?\s*(?P<power>-?\d)\s*\}?)?)"
)

_LAST_WORDS = re.compile(
    r"(?<=[\w)}\]])\s*(?:\\(?:text|mathrm|mbox)\s*\{([^{}\\]+)\}|(?<=[\s})\d])((?:[A-Za-z]{2,}[ /]+){0,3}[A-Za-z]{2,}))"
    r"\s*(\^\s*\{?\s*\d\s*\}?)?[\s.]*$"
)
_NO_UNITS = ("unit", "units", "square unit", "square units", "cubic units", "sq units")


class PlainNumber(NamedTuple):
    """A number with its percent sign, unit and name."""

    value: Fraction  # 10 for "10%"
    percent: bool = False
    unit: Unit | None = None  # None: no unit is given, or the words after the number are not a unit
    name: str = ""  # x in "x = 10"

    def equals(self, reference: PlainNumber, tolerance: Fraction = Fraction(0)) -> bool:
        """Return whether the values are equal. If only one has a percent sign, `10%` equals both 10 and 0.1.

        tolerance: allowed error, relative to the reference.
        """
        targets = [reference.value]
        if self.percent != reference.percent:
            targets.append(reference.value * 100 if self.percent else reference.value / 100)
        if not tolerance:
            return self.value in targets
        return any(abs(self.value - target) <= tolerance * abs(target) for target in targets)

    def clashes(self, other: PlainNumber) -> bool:
        """Return whether units or names show that the two are different quantities."""
        return units_clash(self.unit, other.unit) or names_clash(self.name, other.name)


def ascii_text(text: str) -> str:
    """Replace Unicode digits, signs, spaces and fractions by ASCII or LaTeX. Other characters are kept."""
    if text.isascii():
        return text
    text = _SUPERSCRIPT.sub(lambda m: "^{" + unicodedata.normalize("NFKC", m[0]).replace("\u2212", "-") + "}", text)
    return "".join(c if c.isascii() else _character(c) for c in text)


def _character(c: str) -> str:
    category = unicodedata.category(c)
    if c in _CHARACTERS:
        return _CHARACTERS[c]
    if category == "Nd":
        return str(unicodedata.decimal(c))
    if category in ("Zs", "Cf"):  # spaces; invisible characters
        return THIN if category == "Zs" else ""
    plain = unicodedata.normalize("NFKC", c).replace("\u2044", "/")  # full-width ASCII and fractions
    return f" {plain}" if "/" in plain else plain


def commands(text: str) -> str:
    """Replace equivalent LaTeX commands by one spelling."""
    return _COMMAND.sub(lambda command: _SYNONYMS.get(command[0], command[0]), _DEGREE.sub("°", text))


def tidy(text: str) -> str:
    """Remove fonts, boxes, delimiters of mathematics, Markdown, and punctuation at both ends."""
    # Dollar signs in pairs delimit mathematics. A single one is money.
    text = ascii_text(text)
    if len(_DOLLAR.findall(text)) % 2 == 0:
        text = _DOLLAR.sub("", text)
    text = _BOLD.sub(r"\1", _DELIMITERS.sub("", text))
    if "\\" in text or "~" in text:
        text = commands(text)
        for _ in range(3):  # Fonts and boxes may be nested.
            text = _WRAPPED.sub(r" \1 ", text)
        text = text.replace("\\$", "$")
    return text.lstrip(_LEADING).rstrip(_TRAILING)


def plain_text(text: str) -> str:
    """Return a text for comparison: tidied, with single spaces between words and no other white space."""
    return re.sub(r"(?<!\w) | (?!\w)", "", " ".join(tidy(text).split()))


def usual_brackets(text: str) -> str:
    """Write pairs in one notation: `[0;1[` becomes `[0,1)`."""

    def usual(pair: re.Match[str]) -> str:
        before, left, start, end, right = pair.groups()
        return f"{before}{left.replace(']', '(')}{start},{end}{right.replace('[', ')')}"

    return _INTERVAL.sub(usual, ascii_text(text))


def mark_letters(text: str, names: bool) -> str:
    r"""Replace letters that are text, such as `XI`, by one variable each. docs/verifiers_math.md states the rule.

    names: whether the reference has such letters. If not, `PV` is a product.
    """

    def marked(part: re.Match[str]) -> str:
        printed = tidy(part["letters"])
        word = "".join(_TIMES.sub("", printed).split())
        is_text = bool(_CODE.fullmatch("".join(printed.split())))
        is_text |= names and bool(_NAMES.fullmatch(word) or _LOWER.fullmatch(printed))
        return rf"{part['before']}\variable{{text{word}}}" if is_text else part[0]

    return _PART.sub(marked, text)


def has_letters(reference: str) -> bool:
    """Return whether a part of a reference is letters that are text. `V = IR` is a formula."""
    text = re.sub(r",?\s*\b(?:or|and)\b", ";", _TIMES.sub("+", tidy(reference[:MAX_NUMBER_CHARS])))
    return not re.match(r"[A-Z]{1,3}\s*=", text) and mark_letters(text, names=True) != text


def quote(text: str) -> str:
    """Return up to 40 characters of an answer on one line, for a message."""
    text = " ".join(text.split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def plain_number(text: str) -> PlainNumber | None:
    """Parse a text that is one number. Return None for any other text, such as an expression or two numbers."""
    if len(text) > MAX_NUMBER_CHARS:
        return None
    text = tidy(text)
    if text.startswith("(") and text.endswith(")") and "," not in text:  # (1,234) can be a pair
        text = text[1:-1].strip()

    lead = _LEAD.match(text)
    number = _NUMBER.match(text, lead.end() if lead else 0)
    if not number or (number["sign"] and number["sign2"]):
        return None
    value = _value(number)
    after = _AFTER.match(text, number.end())
    rest = text[after.end() :] if after else ""
    if value is None or after is None or re.match(r"[A-Za-z](?![A-Za-z])", rest):  # 12x is a product
        return None

    # A unit may follow directly, as in `12cm`. Other words may not. A currency sign before the number is also a unit.
    measured = unit(rest)
    if rest.strip() and measured is None and not (rest[0].isspace() and only_words(rest.strip())):
        return None
    if number["money"]:
        measured = {number["money"][-1]: 1, **(measured or {})}
    negative = number["sign"] == "-" or number["sign2"]
    value *= _MULTIPLIERS.get((after["multiplier"] or "").lower(), 1) * (-1 if negative else 1)
    name = lead["name"] if lead else None
    return PlainNumber(value, bool(after["percent"]), measured, (name or "").replace("\\", ""))


def _value(number: re.Match[str]) -> Fraction | None:
    """Return the absolute value of a match of _NUMBER, or None for an invalid fraction or a large exponent."""
    # A repeating decimal: 0.1(6) = 0.1 + 6/90. The zeros around `fixed` complete texts such as ".1" and ".".
    if number["period"]:
        fixed = number["fixed"]
        period = number["period"]
        shift = 10 ** len(fixed.partition(".")[2])
        return _fraction(f"0{fixed}0") + Fraction(int(period), (10 ** len(period) - 1) * shift)

    # In a mixed fraction, a proper fraction follows the whole number.
    top = number["top"] or number["top2"]
    bottom = number["bottom"] or number["bottom2"]
    if top:
        whole = number["whole"] or number["whole2"]
        divisor = _fraction(bottom)
        fraction = _fraction(top) / divisor if divisor else None
        if whole is None or fraction is None:
            return fraction
        return int(whole) + fraction if 0 < fraction < 1 else None

    exponent = int((number["e"] or number["ten"] or number["only"] or "0").strip("{ }"))
    return _fraction(number["decimal"] or "1") * Fraction(10) ** exponent if abs(exponent) <= _MAX_EXPONENT else None


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.strip("{ }").replace(",", "").replace(THIN, ""))


def only_words(text: str) -> bool:
    """Return whether a text is a few words that do not change a number."""
    return bool(_FEW_WORDS.fullmatch(text)) and not CHANGES_NUMBER.search(text)


def unit(text: str) -> Unit | None:
    """Parse a tidied text that is a unit, such as `m/s^2`. Return None for any other text."""
    powers: Counter[str] = Counter()
    sign = 1
    factor = 1
    end = 0
    last_symbol = ""
    text = text.strip()
    for token in _UNIT_WORD.finditer(text):
        word = token["word"]
        if token.start() != end:
            return None
        end = token.end()
        if token["mark"] == "/" or word == "per":
            sign = -1
        elif word in _POWERS and not word.endswith("ed"):  # square meters
            factor = _POWERS[word]
        elif word in _POWERS and last_symbol:  # meters squared
            powers[last_symbol] *= _POWERS[word]
        elif word:
            last_symbol = _symbol(word)
            if not last_symbol:
                return None
            powers[last_symbol] += sign * factor * int(token["power"] or 1)
            factor = 1
    measured = {name: power for name, power in powers.items() if power}
    return measured if measured and end == len(text) else None


def without_unit(text: str) -> tuple[str, Unit | None]:
    r"""Split `6\pi \text{ cm}^2` into the expression and its unit. Remove other words at the end."""
    match = _LAST_WORDS.search(text)
    if not match:
        return text, None
    words = (match[1] or match[2]).strip()
    measured = unit(f"{words} {match[3] or ''}")
    if measured or words in _NO_UNITS or (match[1] and only_words(words)):
        return text[: match.start()], measured
    return text, None


def _symbol(word: str) -> str:
    """Return the symbol of one unit, or "". Symbols are case-sensitive, names are not."""
    name = word.lower()
    if word in _SYMBOLS or len(name) < 3:
        return _SYMBOLS.get(word, "")
    return _SYMBOLS.get(name) or _SYMBOLS.get(name.removesuffix("s"), "")


def units_clash(a: Unit | None, b: Unit | None) -> bool:
    """Return whether both are units and neither contains the other, as `dollars per day` contains `dollars`."""
    return a is not None and b is not None and not (a.items() <= b.items() or b.items() <= a.items())


def names_clash(a: str, b: str) -> bool:
    """Return whether two names are different variables. Words and capitals are labels: `S = 3` matches `x = 3`."""
    return a != b and bool(_VARIABLE.fullmatch(a) and _VARIABLE.fullmatch(b))
