r"""One spelling for LaTeX that is going to be read by latex2sympy: fonts, brackets, bases, fractions without braces.

spelling.py comes first; what is replaced here would not be right in a text that is no mathematics.
"""

from __future__ import annotations

import re
from fractions import Fraction

from megatron_brorl.rewards.plain_number import only_words
from megatron_brorl.rewards.spelling import THIN, ascii_text, commands
from megatron_brorl.rewards.units import Unit, unit

# A numeral with its base: 2516_9, (A3)_{16}, 101_\text{two}, 101 (base 2), 0x1F.
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "eleven": 11, "twelve": 12, "sixteen": 16, "binary": 2, "octal": 8, "hexadecimal": 16}  # fmt: skip
_BASE = rf"(?:\d{{1,2}}(?!\d)|{'|'.join(_BASES)})"
_DIGITS = r"[0-9A-Fa-f]+(?:\.[0-9A-Fa-f]+)?"
_BASED = re.compile(
    rf"(?<![\w.\\])(?:{_DIGITS}|\(\s*{_DIGITS}\s*\)|(?:\\text\s*)?\{{\s*{_DIGITS}\s*\}})\s*(?:"
    rf"_\s*(?:\{{[\s(]*(?:base[\s-]*)?{_BASE}[\s)]*\}}|{_BASE})"
    rf"|\(\s*(?:in\s+)?base[\s-]*{_BASE}\s*\)|(?:in\s+)?base[\s-]*{_BASE}|in\s+(?:binary|octal|hexadecimal)\b)"
)
_PREFIXED = re.compile(r"(?<![\w.])0(?:[xX]([0-9A-Fa-f]+)|[bB]([01]+)|[oO]([0-7]+))(?!\w)")

# Spellings with one meaning, in the order in which they are replaced.
_FONT = re.compile(r"\\(?:text|math)(?:rm|it|bf|sf|normal)?(?![A-Za-z])\s*\{([^{}]*)\}|\\[mh]box\s*\{([^{}]*)\}")
_UNWRAPPED = {"or", "and", "base", "in base", *_BASES, *(f"in {name}" for name in _BASES)}
_SPELLINGS = (
    (re.compile(r"\\imath(?![A-Za-z])"), "i"),
    (re.compile(r"\\[lr]?vert(?![A-Za-z])"), "|"),
    (re.compile(r"\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\vee(?![A-Za-z])|,?\s*\bor\b"), r" \\lor "),
    (re.compile(r"\\wedge(?![A-Za-z])|,?\s*\band\b"), r" \\land "),
    (re.compile(r"\\operatorname\s*\{([a-z]+)\}"), r"\\\1 "),
    (re.compile(r"(?<![\\A-Za-z])(pi|infty|sin|cos|tan|ln|log|exp|sqrt)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(?<![\\A-Za-z])inf(?:inity)?(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"\\log\s*_\s*(\d+(?=\s)|\w)"), r"\\log_{\1}"),
    (re.compile(r"(\\sqrt\s*|\^\s*)\(([^()]*)\)"), r"\1{\2}"),
    (re.compile(rf"(?<=\d){THIN}(?=\d{{3}}(?!\d))"), ""),
    (re.compile(THIN), " "),
    (re.compile(r"(?<=[\w)}])\*\*(?=[\w({])"), "^"),
    (re.compile(r"(?<![\\A-Za-z])([A-Za-z])'(?!')"), r"\1_{p}"),
)
_ROW_END = re.compile(r"\\\\\s+")
_DELIMITER = re.compile(r"(?<!\\)(?:\$|\\[()\[\]])|\\\$")
_BRACED_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d{3}(?!\d))")
_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_LAST_WORDS = re.compile(
    r"(?:\\(?:text|mathrm|mbox)\s*\{([^{}\\]+)\}|(?<=[\s})\d])((?:[A-Za-z]{2,}[ /]+){0,3}[A-Za-z]{2,}))"
    r"\s*(\^\s*\{?\s*\d\s*\}?)?[\s.]*$"
)
_NO_UNITS = ("unit", "units", "square unit", "square units", "cubic units", "sq units")


def spell(text: str) -> tuple[str, Unit | None]:
    """Return a text in one spelling, without the unit at its end, and that unit."""
    text = commands(_ROW_END.sub(r"\\\\", _BRACED_COMMA.sub("", ascii_text(text))))
    text, measured = _without_unit(_DELIMITER.sub("", text))

    # Fonts go first: the words in them may be "or" and "base".
    text = _FONT.sub(_unwrapped, text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)

    # In brackets a comma between digits parts the members of a tuple or a set.
    if not re.search(r"[(\[]|\\\{", text):
        text = _GROUPED.sub(lambda m: m[0].replace(",", ""), text)
    return _PREFIXED.sub(_based, _BASED.sub(_based, text)), measured


def braced(text: str) -> str:
    r"""Return LaTeX with braces around the arguments of \frac, \binom and \sqrt."""
    out, at = "", 0
    for command in re.finditer(r"\\(?:frac|binom|sqrt)(?![A-Za-z])", text):
        if command.start() < at:
            continue
        # The text before the command, and the degree of a root.
        out += text[at : command.end()]
        at = command.end()
        if root := re.compile(r"\s*\[[^\[\]]*\]").match(text, at):
            out, at = out + root[0].strip(), root.end()
        for _ in range(1 if command[0] == r"\sqrt" else 2):
            end = _argument_end(text, at)
            out += "{" + braced(re.sub(r"^\{(.*)\}$", r"\1", text[at:end].strip(), flags=re.DOTALL)) + "}"
            at = end
    return out + text[at:]


def _argument_end(text: str, at: int) -> int:
    """Where the argument that begins at `at` ends: braces, a command, or one character."""
    depth = 0
    for token in re.compile(r"\\[A-Za-z]+|\\.|\S", re.DOTALL).finditer(text, at):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    raise ValueError("an argument is missing")


def _without_unit(text: str) -> tuple[str, Unit | None]:
    r"""Take the words, or the unit, from the end of `6\pi \text{ cm}^2`; the unit is None for other words."""
    match = _LAST_WORDS.search(text)
    words = (match[1] or match[2]).strip() if match else ""
    measured = unit(f"{words} {match[3] or ''}".strip()) if match else None
    dress = measured or words in _NO_UNITS or (match and match[1] and only_words(words))

    # Something must be left that the unit measures.
    if not match or not dress or not re.search(r"[\w)}\]]\s*$", text[: match.start()]):
        return text, None
    return text[: match.start()], measured


def _unwrapped(match: re.Match[str]) -> str:
    r"""Keep words as \text{...}, which is one symbol, and take single letters and anything else out of the font."""
    inside = (match[1] if match[1] is not None else match[2]).strip()
    word = re.fullmatch(r"[A-Za-z][A-Za-z .'-]+", inside) and inside.lower() not in _UNWRAPPED
    return rf"\text{{{inside}}}" if word else f" {inside} "


def _based(match: re.Match[str]) -> str:
    """Return a numeral as one symbol for its value and its base, or as digits if the base is ten."""
    text = match[0]
    if match.re is _PREFIXED:
        digits, base = next((part, base) for part, base in zip(match.groups(), (16, 2, 8), strict=True) if part)
    else:
        digits = re.search(_DIGITS, text.replace(r"\text", ""))[0]  # type: ignore[index]
        name = re.findall(_BASE, text[text.index(digits) + len(digits) :])[-1]
        base = _BASES.get(name) or int(name)

    # The value makes 0101_2 and 101_2 one symbol.
    whole, _, decimals = digits.partition(".")
    try:
        value = Fraction(int(whole + decimals, base), base ** len(decimals))
    except ValueError:
        return text  # The digits are not digits of this base, so this is an index.
    if match.re is _BASED and not re.search(r"\d", digits) and not re.fullmatch("[A-F]{2,}", digits):
        return text
    return f" {digits} " if base == 10 else rf"\variable{{n{value.numerator}o{value.denominator}base{base}}}"
