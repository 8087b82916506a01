"""What docs/guide.md marks to be run, and how each of it is marked."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide.md").read_text()

_BLOCK = re.compile(
    r"<!-- (?P<mark>run[^>]*?) -->\n```(?P<kind>\w+)\n(?P<text>.*?)```\n(?:\n```text\n(?P<output>.*?)```)?",
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A program or a session of the page."""

    mark: str
    kind: str
    text: str
    output: str | None
    """What the page says that it prints; None: nothing is said of it."""


def blocks(mark: str, kind: str = "python") -> list[Block]:
    """Return the blocks with a mark, in the order of the page."""
    found = [Block(**match.groupdict()) for match in _BLOCK.finditer(PAGE)]
    return [block for block in found if (block.mark, block.kind) == (mark, kind)]


def sessions(mark: str) -> list[tuple[str, str]]:
    """Return each command and what it prints."""
    found = []
    for block in blocks(mark, "console"):
        for session in block.text.split("$ ")[1:]:
            command, _, output = session.partition("\n")
            found.append((command, output))
    return found


def matches(expected: str, printed: str) -> bool:
    """Return whether a text is what the page says; "..." on the page stands for anything."""
    pattern = ".*".join(re.escape(" ".join(part.split())) for part in expected.split("..."))
    return re.fullmatch(rf"\s*{pattern}\s*", " ".join(printed.split())) is not None
