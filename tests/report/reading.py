"""Reads a report with the standard library's parser: what tags there are, and what stands in them."""

from __future__ import annotations

import html.parser
import json
from collections import Counter

_VOID = {"meta", "br", "input", "link", "img"}


class Page(html.parser.HTMLParser):
    """A parsed report."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.texts: list[str] = []
        self.styles: list[str] = []
        self.ids: Counter[str] = Counter()
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids.update(value for name, value in attrs if name == "id")
        if tag not in _VOID:
            self._open.append((tag, dict(attrs)))
            if tag == "script":
                self.scripts.append((dict(attrs), ""))

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        opened, _ = self._open.pop()
        assert opened == tag, f"<{opened}> is closed by </{tag}>"

    def handle_data(self, data):
        tag = self._open[-1][0] if self._open else ""
        if tag == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data
        elif tag == "style":
            self.styles.append(data)
        elif data.strip():
            self.texts.append(data.strip())

    @property
    def text(self) -> str:
        """All that is read, in order."""
        return " ".join(self.texts)

    @property
    def data(self):
        """What the script is given."""
        (found,) = (text for attributes, text in self.scripts if attributes.get("type") == "application/json")
        return json.loads(found)

    def tile(self, name: str) -> str:
        """Return a number at the top."""
        return self.texts[self.texts.index(name) + 1]
