# SPDX-License-Identifier: Apache-2.0
"""A C preprocessor that knows just enough to read an API header as one build configuration sees it.

Handles comments, line continuation, #if/#ifdef/#ifndef/#elif/#else/#endif with defined(), integers and the
logical and comparison operators, #define/#undef of object macros and of macros with parameters that paste
tokens. #include is ignored: every header is read on its own. Never guesses: an expression that it cannot read
raises HeaderError. Invariant: text comes out in file order, with the macros as they stood at that line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_WORD = re.compile(r"[A-Za-z_]\w*")
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_TOKEN = re.compile(r"\s*(defined|&&|\|\||[!<>=]=|[!<>()+\-*]|0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*)(?:[uUlL]+\b)?")


class HeaderError(Exception):
    """A header says something this reader does not understand; names the line."""


@dataclass(frozen=True)
class Macro:
    """One #define. `parameters` is None for an object macro."""

    name: str
    parameters: tuple[str, ...] | None
    body: str


def strip_comments(text: str) -> str:
    """Replaces comments by a space, keeps strings and line breaks, joins continued lines."""

    def replace(match: re.Match[str]) -> str:
        found = match[0]
        return found if found.startswith('"') else " " + "\n" * found.count("\n")

    return _STRING_OR_COMMENT.sub(replace, text.replace("\\\n", " "))


class _Expression:
    """Recursive descent over the tokens of one #if line; unknown names are 0, as C has it."""

    def __init__(self, text: str, macros: Mapping[str, Macro]) -> None:
        self._macros = macros
        self._text = text
        self._tokens: list[str] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise HeaderError(f"cannot read the condition {text!r}")
            self._tokens.append(match[1])
            at = match.end()

    def value(self) -> int:
        """The value of the whole expression."""
        result = self._either()
        if self._tokens:
            raise HeaderError(f"cannot read the condition {self._text!r} from {self._tokens[0]!r} on")
        return result

    def _take(self, *wanted: str) -> str | None:
        return self._tokens.pop(0) if self._tokens and self._tokens[0] in wanted else None

    def _either(self) -> int:
        result = self._both()
        while self._take("||"):
            result = int(bool(self._both()) or bool(result))
        return result

    def _both(self) -> int:
        result = self._compare()
        while self._take("&&"):
            result = int(bool(self._compare()) and bool(result))
        return result

    def _compare(self) -> int:
        left = self._unary()
        while operator := self._take("==", "!=", "<", ">", "<=", ">="):
            right = self._unary()
            left = int(
                {
                    "==": left == right,
                    "!=": left != right,
                    "<": left < right,
                    ">": left > right,
                    "<=": left <= right,
                    ">=": left >= right,
                }[operator]
            )
        return left

    def _unary(self) -> int:
        if self._take("!"):
            return int(not self._unary())
        if self._take("("):
            result = self._either()
            if not self._take(")"):
                raise HeaderError(f"a bracket is open in the condition {self._text!r}")
            return result
        if not self._tokens:
            raise HeaderError(f"the condition {self._text!r} ends too early")
        word = self._tokens.pop(0)
        if word == "defined":
            bracket = self._take("(")
            name = self._tokens.pop(0) if self._tokens else ""
            if bracket and not self._take(")"):
                raise HeaderError(f"a bracket is open in the condition {self._text!r}")
            return int(name in self._macros)
        if word[0].isdigit():
            return int(word, 0)
        macro = self._macros.get(word)
        if macro is None or macro.parameters is not None or not macro.body:
            return 0
        return _Expression(macro.body, self._macros).value()


def expand(text: str, macros: Mapping[str, Macro], *, only: re.Pattern[str] | None = None) -> str:
    """Replaces macros in `text` until nothing changes; `only` restricts the names that are replaced."""

    def once(source: str, hidden: frozenset[str]) -> str:
        out = []
        at = 0
        for match in _WORD.finditer(source):
            if match.start() < at:
                continue
            name = match[0]
            macro = macros.get(name)
            if macro is None or name in hidden or (only is not None and not only.fullmatch(name)):
                continue
            end = match.end()
            body = macro.body
            painted: frozenset[str] = frozenset()
            if macro.parameters is not None:
                call = re.compile(r"\s*\(([^()]*)\)").match(source, end)
                if call is None:
                    continue
                end = call.end()
                arguments = [part.strip() for part in call[1].split(",")]
                if "##" not in body:  # C expands arguments first, unless they are pasted
                    arguments = [once(argument, hidden) for argument in arguments]
                    # What is left in them was not to be replaced, and stays so ("painted") in the second scan.
                    painted = frozenset(_WORD.findall(" ".join(arguments)))
                values = dict(zip(macro.parameters, arguments, strict=True))
                body = _WORD.sub(lambda word, values=values: values.get(word[0], word[0]), body)  # type: ignore[misc]
                body = re.sub(r"\s*##\s*", "", body)
            out += [source[at : match.start()], once(body, hidden | painted | {name})]
            at = end
        return "".join([*out, source[at:]])

    return once(text, frozenset())


def lines(text: str, defined: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Macro]]]:
    """Yields every active line that is no directive with the macros in force there.

    The dictionary is the live one: it changes while the iteration goes on, so look at it before the next step.
    """
    macros = {name: Macro(name, None, body) for name, body in defined.items()}
    # One entry for each open #if: (a branch has been taken, this branch is active, the outer one is active).
    stack: list[tuple[bool, bool, bool]] = []
    active = True
    for number, raw in enumerate(strip_comments(text).split("\n"), 1):
        match = re.match(r"\s*#\s*(\w+)\s*(.*)", raw)
        if match is None:
            if active and raw.strip():
                yield raw, macros
            continue
        word, rest = match[1], match[2].strip()
        if word in ("if", "ifdef", "ifndef"):
            outer, taken = active, False
            if active:
                taken = (
                    bool(_Expression(rest, macros).value()) if word == "if" else (rest in macros) == (word == "ifdef")
                )
            active = outer and taken
            stack.append((taken, active, outer))
        elif word in ("elif", "else", "endif"):
            if not stack:
                raise HeaderError(f"line {number}: #{word} without #if")
            taken, _, outer = stack.pop()
            if word == "endif":
                active = outer
                continue
            active = outer and not taken and (word == "else" or bool(_Expression(rest, macros).value()))
            stack.append((taken or active, active, outer))
        elif active and word == "define":
            define = re.match(r"(\w+)(\(([^)]*)\))?\s*(.*)", rest)
            if define is None:
                raise HeaderError(f"line {number}: cannot read #define {rest}")
            parameters = None if define[2] is None else tuple(part.strip() for part in define[3].split(","))
            macros[define[1]] = Macro(define[1], parameters, define[4].strip())
        elif active and word == "undef":
            macros.pop(rest, None)
    if stack:
        raise HeaderError("an #if is never closed")
