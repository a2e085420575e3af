"""The language of a response, by langdetect with a fixed seed."""

from __future__ import annotations

import functools

_CODES = (  # of langdetect 1.0.9
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro "
    "ru sk sl so sq sv sw ta te th tl tr uk ur vi zh-cn zh-tw"
)
LANGUAGES = frozenset(_CODES.split())


def is_language(response: str, language: str) -> bool:
    """Whether it is in that language. A text without letters is in every language, as published."""
    return detected(response) in (None, language)


def response_language(response: str, language: str) -> bool:
    """The whole response is in that language."""
    return is_language(response, language)


@functools.lru_cache(maxsize=32)  # several instructions ask for the language of one response
def detected(text: str) -> str | None:
    """The code of the likeliest language; None where there is nothing to tell it by."""
    import langdetect  # only scoring processes need it

    langdetect.DetectorFactory.seed = 0  # without a seed its answer to one text changes from call to call
    try:
        code: str = langdetect.detect(text)
    except langdetect.LangDetectException:
        return None
    return code
