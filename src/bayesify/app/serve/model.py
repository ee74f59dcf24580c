"""The interface of a served model, its description, and the error of a wrong input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from bayesify.app.serve.requests import Examples

__all__ = ["Batch", "Column", "ModelCard", "ServedModel", "joined"]

#: What a network needs to predict some examples: arrays by name, with one first axis (N, ...).
Batch = dict[str, npt.NDArray[Any]]


class Column(BaseModel):
    """An input column of a table, for those who fill in a row."""

    name: str
    kind: Literal["number", "category", "flag", "date", "text", "image"]
    example: str | float | bool
    #: The most frequent levels of a category; the words for no and yes.
    options: list[str] = []
    #: Smallest and largest value in training, of a number.
    low: float | None = None
    high: float | None = None
    whole: bool = False
    #: Number of tokens that a text is cut to, as in training.
    longest: int | None = None
    #: Whether training had missing values.
    can_be_missing: bool = False


class ModelCard(BaseModel):
    """Description of a model: its inputs and its answers."""

    name: str
    source: Literal["run", "onnx"]
    task: Literal["classification", "regression"]
    input: Literal["images", "rows"]
    #: Height and width, and for colours 3 channels, of an image as nested lists; empty where an
    #: image must be a file.
    image_shape: list[int] = []
    #: Whether an encoded image may have any size.
    any_size: bool = False
    #: Whether its images are MNIST's digits, as a drawing on the page is prepared to be.
    draws_digits: bool = False
    columns: list[Column] = []
    #: Columns of the training table that a row may have, and that are not read.
    unused_columns: list[str] = []
    classes: list[str] = []
    target: str = ""
    #: The unit of the uncertainties.
    unit: str
    num_samples: int
    #: Probability of the intervals of a regression.
    level: float
    #: The service abstains where the total uncertainty is larger; null if it never does.
    threshold: float | None
    #: The data that the threshold is from, or why there is none.
    threshold_origin: str


class ServedModel(Protocol):
    """A model that reads examples from JSON and predicts them."""

    @property
    def card(self) -> ModelCard:
        """Its description."""

    def read(self, examples: Examples) -> Batch:
        """Return the examples of a request as arrays.

        Raises:
            InputError: an example is not as the card says.
        """

    def predict(self, batch: Batch) -> list[dict[str, Any]]:
        """Return an answer for each example.

        Raises:
            InputError: a prediction is not finite.
        """


def joined(batches: Sequence[Batch]) -> Batch:
    """Return several batches as one.

    Example:
        >>> joined([{"x": np.zeros((1, 3))}, {"x": np.ones((2, 3))}])["x"].shape
        (3, 3)
    """
    return {name: np.concatenate([each[name] for each in batches]) for name in batches[0]}
