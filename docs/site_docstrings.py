"""Docstrings as the site's parser reads them, for Griffe."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([^`]+)`")


class SiteDocstrings(Extension):
    """Give one example the title of several, and Sphinx's markup the form of Markdown."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of an object after it was read."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
            text = re.sub(r"::$", ":", text, flags=re.M)
            obj.docstring.value = _ROLE.sub(r"`\1`", text)
