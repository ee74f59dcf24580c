"""Docstrings as the site's parser reads them, for Griffe."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

from griffe import Attribute, Docstring, Extension, Object

_ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([^`]+)`")


class SiteDocstrings(Extension):
    """Give one example the title of several, and Sphinx's markup the form of Markdown."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of an object after it was read."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
            text = re.sub(r"::$", ":", text, flags=re.M)
            obj.docstring.value = _ROLE.sub(r"`\1`", text)

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Take the ``#:`` comment above a constant or a field as its docstring."""
        if attr.docstring is None and attr.lineno is not None:
            before = attr.lines_collection[attr.filepath][: attr.lineno - 1]
            above = (line.strip() for line in reversed(before))
            comment = list(takewhile(lambda line: line.startswith("#:"), above))
            if comment:
                text = " ".join(line.removeprefix("#:").strip() for line in reversed(comment))
                attr.docstring = Docstring(text, parent=attr)
