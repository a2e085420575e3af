"""Units of measurement as text: `km/h`, `km h^{-1}` and `kilometers per hour` are one unit. No unit is converted."""

from __future__ import annotations

import re

Unit = dict[str, int]  # symbol -> power

# symbol: what else it is called; a plural -s is understood.
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
_WORD = re.compile(r"\s*(?:(?P<word>[A-Za-z]+|[$€£¥°Ωµμ])(?:\s*\^\s*\{?\s*(?P<power>-?\d)\s*\}?)?|(?P<mark>[/*.()]))")


def unit(text: str) -> Unit | None:
    """The unit that a tidied text writes; None where it is not one."""
    # Tokens, with the command for a product as a star.
    text = text.replace("\\cdot", "*").replace("\\times", "*").replace("\\Omega", "Ω").strip()
    powers: Unit = {}
    sign, factor, at = 1, 1, 0

    # From the left: a stroke or "per" divides by what follows, "square" and "squared" raise to a power.
    last = ""
    while at < len(text):
        token = _WORD.match(text, at)
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
            # A unit, which takes the power that stands before or behind it.
            last = _symbol(word)
            if not last:
                return None
            powers[last] = powers.get(last, 0) + sign * factor * int(token["power"] or 1)
            factor = 1
    return {name: power for name, power in powers.items() if power} or None


def _symbol(word: str) -> str:
    """The symbol of one unit, or "". Symbols are told apart by case, names are not."""
    if word in _SYMBOLS:
        return _SYMBOLS[word]
    name = word.lower()
    if len(name) < 3:
        return ""
    return _SYMBOLS.get(name) or _SYMBOLS.get(name.removesuffix("s"), "")
