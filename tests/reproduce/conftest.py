"""Fixtures of the experiments' tests."""

from tests.killable import epochs_done

__all__ = ["epochs_done"]
