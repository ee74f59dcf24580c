"""Run parts of a command as tasks of a Ray cluster."""

from bayesify.app.runs import ConfigError

__all__ = ["address_of"]


def address_of(on: str) -> str | None:
    """Return the address of the cluster that an option ``--on`` names.

    Args:
        on: ``ray``, or ``ray=ADDRESS``.

    Returns:
        An address as for ``ray.init``; None for the cluster of the variable ``RAY_ADDRESS`` or of
        this machine, or if there is none for a new one on this machine.

    Raises:
        ConfigError: the option is something else.

    Example:
        >>> address_of("ray"), address_of("ray=10.0.0.1:6379")
        (None, '10.0.0.1:6379')
    """
    engine, equals, address = on.partition("=")
    if engine != "ray" or bool(equals) != bool(address):
        raise ConfigError(f"on must be ray or ray=ADDRESS, got {on!r}")
    return address or None
