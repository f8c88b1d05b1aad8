"""Places for mutants in C++ and CUDA, from the tokens.

Comments, strings, preprocessor lines and static_assert have none, nor have lines that an x86-64 machine with
gcc never compiles. clang-format's spaces tell operators from the brackets of templates, and from pointers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from .sites import EXTREMES, SWAPS, Site, one_more


class Token(NamedTuple):
    text: str
    start: int
    end: int


#: Comments, preprocessor lines and strings come first, as they may contain what looks like other tokens.
_SKIPPED = r"//[^\n]*|/\*.*?\*/|^[ \t]*\#(?:\\\n|/\*.*?\*/|[^\n])*"
_STRING = r'R"(?P<raw>\w*)\(.*?\)(?P=raw)"|"(?:[^"\\\n]|\\.)*"|(?<!\w)\'(?:[^\'\\\n]|\\.)+\''
_PLAIN = r"[A-Za-z_]\w*|\.?\d(?:[\w.']|(?<=[eE])[-+])*|<<=|>>=|->|::|\+\+|--|&&|\|\||[-+*/%&|^<>=!]=|<<|\S"
_TOKEN = re.compile(f"(?P<skipped>{_SKIPPED})|{_STRING}|{_PLAIN}", re.M | re.S)
_DIRECTIVE = re.compile(r"[ \t]*#\s*(if|ifdef|ifndef|elif|else|endif)\b([^\n]*)")

#: What gcc says of an x86-64 machine with Linux. Both branches of all other conditions have places.
_TRUE = ("__x86_64__", "__linux__", "__GNUC__", "__OPTIMIZE__")
_FALSE = ("__clang__", "__aarch64__", "__ARM_FEATURE_FMA", "__APPLE__", "_WIN32", "_MSC_VER")


def _holds(condition: str) -> bool | None:
    """Whether a condition of the preprocessor holds here, or None if builds differ."""
    values: list[bool | None] = []
    for part in condition.partition("//")[0].split("&&"):
        found = re.fullmatch(r"\s*(!?)\s*(?:defined\s*\(?\s*)?(\w+)\s*\)?\s*", part)
        known = found is not None and found[2] in (*_TRUE, *_FALSE)
        values.append((found[2] in _TRUE) != bool(found[1]) if found is not None and known else None)
    return False if False in values else None if None in values else True


def _tokens(source: str) -> list[Token]:
    """The tokens that this machine compiles."""
    found: list[Token] = []
    #: For each open #if: whether the branch is compiled, and whether a branch before it holds for sure.
    branches: list[tuple[bool, bool]] = []
    for token in _TOKEN.finditer(source):
        if token["skipped"] is None:
            if all(compiled for compiled, _ in branches):
                found.append(Token(token[0], token.start(), token.end()))
            continue
        directive = _DIRECTIVE.match(token[0])
        if directive is None:
            continue
        word, condition = directive[1], directive[2]
        if word == "endif":
            branches.pop()
            continue
        decided = word in ("elif", "else") and branches.pop()[1]
        value = True if word == "else" else _holds(("!" if word == "ifndef" else "") + condition)
        branches.append((not decided and value is not False, decided or value is True))
    return found


def _partners(tokens: list[Token]) -> dict[int, int]:
    """Where each opening bracket closes."""
    found, opened = {}, []
    for place, token in enumerate(tokens):
        if token.text in ("(", "[", "{"):
            opened.append(place)
        elif token.text in (")", "]", "}") and opened:
            found[opened.pop()] = place
    return found


def cpp_sites(source: str) -> Iterator[Site]:
    tokens = _tokens(source)
    partners = _partners(tokens)
    asserted = 0
    for place, token in enumerate(tokens):
        text = token.text
        if text == "static_assert":
            asserted = partners.get(place + 1, place)
        if place < asserted:
            continue
        # clang-format puts spaces around operators of two operands, and around no others.
        binary = (
            source[token.start - 1 : token.start].isspace() and source[token.end : token.end + 1].isspace()
        )
        follows = tokens[place + 1].text if place + 1 < len(tokens) else ""
        if binary and text in SWAPS:
            kind = "arithmetic" if text in "+-*/%" else "and or" if text in ("&&", "||") else "relation"
            yield Site(token.start, token.end, SWAPS[text], kind)
        elif text in EXTREMES and follows == "(":
            yield Site(token.start, token.end, EXTREMES[text], "extreme")
        elif text == "if":
            opening = place + 1 + (follows == "constexpr")
            closing = partners.get(opening)
            if closing is not None and not {";", "="} & {each.text for each in tokens[opening:closing]}:
                start, end = tokens[opening].end, tokens[closing].start
                yield Site(start, end, f"!({source[start:end]})", "condition")
        elif text[0].isdigit() and (larger := one_more(text)) is not None:
            yield Site(token.start, token.end, larger, "constant")
    yield from _cpp_statements(tokens, partners)


def _cpp_statements(tokens: list[Token], partners: dict[int, int]) -> Iterator[Site]:
    """Assignments and calls, which a mutant lacks, and results, which it replaces by the type's default."""
    scopes: list[tuple[str, int]] = [("class", 0)]
    start = 0
    for place, token in enumerate(tokens):
        text = token.text
        if text in ("(", "["):
            scopes.append(("brackets", start))
        elif text == "{":
            kind = _scope(tokens, start, place, scopes[-1][0])
            scopes.append((kind, start))
            start = start if kind == "values" else place + 1
        elif text in (")", "]", "}") and len(scopes) > 1:
            kind, before = scopes.pop()
            inner = text != "}" or kind == "values" or scopes[-1][0] == "brackets"
            start = before if inner else place + 1
        elif text == ":" and tokens[start].text in ("case", "default", "public", "private", "protected"):
            start = place + 1
        elif text == ";" and scopes[-1][0] in ("code", "class"):
            first = _after_heads(tokens, start, partners)
            if scopes[-1][0] == "code" and first < place:
                if tokens[first].text == "return" and first + 1 < place:
                    if tokens[first + 1].text not in ("false", "0", "nullptr", "{"):
                        yield Site(tokens[first].start, token.start, "return {}", "return")
                elif _has_effect(tokens, first, place, partners):
                    yield Site(tokens[first].start, token.start, "", "statement")
            start = place + 1


def _scope(tokens: list[Token], start: int, place: int, outer: str) -> str:
    """What an opening brace begins: "class" (or a namespace), "code" or the "values" of an initializer."""
    before = tokens[place - 1].text if place else ""
    head = [token.text for token in tokens[start:place]]
    if outer == "values":
        return "values"
    if before != ")" and {"namespace", "struct", "class", "union", "enum", "extern"} & {*head}:
        return "class"
    ends = (")", "]", "else", "do", "try", "const", "noexcept", "override", "mutable", ";", "{", "}", ":")
    return "code" if before in ends or "->" in head or not head else "values"


def _after_heads(tokens: list[Token], place: int, partners: dict[int, int]) -> int:
    """Where a statement begins after the heads of the conditions and loops that hold it."""
    while place < len(tokens):
        text = tokens[place].text
        if text in ("if", "for", "while", "switch"):
            place += 1 + (tokens[place + 1].text == "constexpr")
            place = partners.get(place, place) + 1
        elif text == "else" or (text.isupper() and len(text) > 2 and tokens[place + 1].text == "for"):
            place += 1
        else:
            return place
    return place


def _has_effect(tokens: list[Token], place: int, end: int, partners: dict[int, int]) -> bool:
    """Whether a statement is an assignment or a call, and no declaration."""
    words = ("throw", "using", "typedef", "delete", "goto", "break", "continue", "static_assert", "return")
    if tokens[place].text in ("*", "++", "--"):
        place += 1
    if not re.match(r"[A-Za-z_]", tokens[place].text) or tokens[place].text in words:
        return False
    called = False
    place += 1
    while place < end:
        text = tokens[place].text
        if text in (".", "->", "::"):
            place += 2 + (tokens[place + 1].text == "template")
        elif text in ("(", "["):
            called, place = text == "(", partners.get(place, end) + 1
        elif text == "<" and tokens[place].start == tokens[place - 1].end:
            depth = 0
            while place < end:
                depth += {"<": 1, ">": -1}.get(tokens[place].text, 0)
                place += 1
                if depth == 0:
                    break
        else:
            return text in ("++", "--") or (text.endswith("=") and text not in ("==", "!=", "<=", ">="))
    return called
