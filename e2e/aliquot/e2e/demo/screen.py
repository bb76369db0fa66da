# SPDX-License-Identifier: Apache-2.0
"""How the demo speaks: headings, sentences, tables, and checks that are counted.

Never decides what is told. Invariant: every check appears on the screen, and one that failed is told again at the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_WIDTH = 100


class Screen:
    """Output of one demo, and what it checked so far."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(width=_WIDTH, highlight=False, soft_wrap=False)
        self._started = time.monotonic()
        self.checked = 0
        self.wrong: list[str] = []

    def chapter(self, text: str) -> None:
        """Begins a part of the story."""
        self._console.print()
        self._console.rule(Text(text, style="bold"), align="left", characters="─")

    def say(self, text: str) -> None:
        """A sentence or two."""
        self._console.print(Text(text))

    def lines(self, text: str) -> None:
        """Lines to copy from, never broken."""
        self._console.print(Text(text), soft_wrap=True)

    def progress(self, text: str) -> None:
        """What is going on right now, with the time since the start."""
        self._console.print(Text(f"  {time.monotonic() - self._started:5.1f} s  {text}", style="dim"))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows under headings."""
        table = Table(show_edge=False, pad_edge=False, header_style="bold", box=None, padding=(0, 3, 0, 0))
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self._console.print(table)

    def terminal(self, title: str, text: str) -> None:
        """What a program printed, in a frame."""
        self._console.print(Panel(Text(text.strip("\n"), no_wrap=True), title=title, title_align="left", expand=False))

    def check(self, holds: bool, text: str) -> None:
        """Says whether something is as it has to be, and counts it."""
        self.checked += 1
        if not holds:
            self.wrong.append(text)
        mark, style = ("✓", "green") if holds else ("✗", "bold red")
        self._console.print(Text(f"{mark} {text}", style=style))

    def ending(self) -> int:
        """The last line; the exit status."""
        seconds = time.monotonic() - self._started
        self._console.print()
        if self.wrong:
            self._console.print(Text(f"{len(self.wrong)} of {self.checked} checks failed:", style="bold red"))
            for text in self.wrong:
                self._console.print(Text(f"✗ {text}", style="bold red"))
            return 1
        self._console.print(
            Text(f"All {self.checked} checks hold; the story took {seconds:.0f} s.", style="bold green")
        )
        return 0
