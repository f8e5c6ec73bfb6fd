"""What others said, as text that can be shown: in a terminal, in a log viewer, in a page that escapes HTML."""
from __future__ import annotations

import codecs
import unicodedata

MAX_BYTES = 1024

# What steers a terminal, turns the direction of text round, hides, or is no character at all.
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_REPLACEMENT = "\ufffd"
_PLAIN = frozenset({"", "identity"})


def of(body: bytes, content_encoding: str | None) -> str | None:
    """The first MAX_BYTES of an answer's body as safe text: UTF-8, what is none replaced, no character cut in two.
    None when the body is compressed: it is never unpacked."""
    if body and (content_encoding or "").strip().lower() not in _PLAIN:
        return None
    whole = len(body) <= MAX_BYTES
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(body[:MAX_BYTES], final=whole)
    return safe(text if whole else text.removesuffix("\r"))  # whose newline may have been cut off


def safe(text: str) -> str:
    """The text with a U+FFFD for each control character but newline and tab, format character (bidirectional controls,
    zero widths), line or paragraph separator, surrogate and noncharacter. The newline of CR LF is a newline."""
    return "".join(_shown(character, "\n\t") for character in text.replace("\r\n", "\n"))


def line(text: str) -> str:
    """As `safe`, and it stays one line: newlines and tabs are replaced as well."""
    return "".join(_shown(character, "") for character in text)


def _shown(character: str, kept: str) -> str:
    if character in kept:
        return character
    unsafe = unicodedata.category(character) in _UNSAFE_CATEGORIES or _is_noncharacter(ord(character))
    return _REPLACEMENT if unsafe else character


def _is_noncharacter(point: int) -> bool:
    return 0xFDD0 <= point <= 0xFDEF or point & 0xFFFE == 0xFFFE
