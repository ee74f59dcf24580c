"""The page of the service for people: draw or open an image, or fill in a row."""

from __future__ import annotations

import secrets

from jinja2 import Environment, PackageLoader, StrictUndefined

from bayesify.app.serve.model import ModelCard

__all__ = ["page"]

_TEMPLATES = Environment(
    loader=PackageLoader("bayesify.app.serve", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def page(card: ModelCard) -> tuple[str, str]:
    """Return the page of a model, and the content security policy that it is sent with.

    The policy allows the page's own script only, and connections to the service only.
    """
    nonce = secrets.token_urlsafe(16)
    text = _TEMPLATES.get_template("page.html").render(
        card=card.model_dump(), nonce=nonce, has_drawing=card.draws_digits
    )
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data: blob:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text, policy
