"""The served model of a run: its network, its reader of examples, its threshold of abstention."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bayesify.app.runs import Run, RunError
from bayesify.app.runs.measure import in_units
from bayesify.app.serve.answers import class_answers, number_answers
from bayesify.app.serve.images import ImageReader, check_size, decoded_exactly
from bayesify.app.serve.model import Batch, ModelCard
from bayesify.app.serve.requests import Examples
from bayesify.app.serve.rows import RowReader
from bayesify.datasets import ImageData, ImageSchema
from bayesify.distributions.posteriors import Delta
from bayesify.module.bayesian import BayesianModule
from bayesify.module.freezing import FrozenNetwork, freeze
from bayesify.prediction import CategoricalPredictive, CountPredictive, Predictive
from bayesify.tabular.outside import widened
from bayesify.tabular.table_data import TableData

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.schema import TableSchema

__all__ = ["RunModel"]

#: Held-out examples from which the threshold is computed.
_MOST_HELD_OUT = 2_000
#: Kinds of columns that are not served.
_NOT_SERVED = {
    "image": "images through a pretrained network",
    "token": "texts through an adapter",
}
#: Examples in one pass of all weight samples; more would need much memory.
_AT_ONCE = 64


class RunModel:
    """A trained run as a served model.

    Args:
        run: the run.
        bnn: its network, pruned or not.
        num_samples: weight samples, at least 1; a point estimate has one.
        level: probability of a regression's intervals, strictly between 0 and 1.
        coverage: share of the run's held-out examples that the threshold answers, strictly between
            0 and 1.

    Raises:
        RunError: a number is out of its range, or a pretrained network reads images of the run.
    """

    def __init__(
        self, run: Run, bnn: BayesianModule, *, num_samples: int, level: float, coverage: float
    ) -> None:
        for name, value in (("level", level), ("coverage", coverage)):
            if not 0.0 < value < 1.0:
                raise RunError(f"{name} must lie strictly between 0 and 1, got {value}")
        if num_samples < 1:
            raise RunError(f"samples must be at least 1, got {num_samples}")
        for column in () if run.table is None else run.table.columns:
            if column.kind in _NOT_SERVED:
                raise RunError(
                    f"serve takes no {_NOT_SERVED[column.kind]}, as {column.name!r} of "
                    f"{run.folder}; use bayesify predict"
                )
        self._run, self._bnn = run, bnn
        self._num_samples = 1 if isinstance(bnn.posterior, Delta) else num_samples
        self._level = level
        self._frozen = _frozen(bnn, self._num_samples)
        self._rows = _row_reader(run.table) if run.table is not None else None
        self._images = None if run.table is not None else _image_reader(run.images)
        self.card = self._describe(*self._threshold(coverage))

    def read(self, examples: Examples) -> Batch:
        """Return ``inputs`` (N, D); for a table also ``distances`` and ``outside`` (N,)."""
        if self._images is not None:
            pixels = torch.from_numpy(self._images.read(examples))
            return {"inputs": self._inputs_of(pixels).numpy()}
        assert self._rows is not None
        assert self._run.table is not None
        schema = self._run.table
        values = self._rows.read(examples)
        distances = schema.outside(values)
        names = np.array([column.name for column in schema.columns], dtype=object)
        return {
            "inputs": schema.encode(values),
            "distances": distances.max(axis=1),
            "outside": np.where((distances > 0.0).any(axis=1), names[distances.argmax(axis=1)], ""),
        }

    def predict(self, batch: Batch) -> list[dict[str, Any]]:
        """Return the answers, from the same weight samples in every call."""
        inputs = torch.from_numpy(batch["inputs"])
        distances = torch.from_numpy(batch["distances"]) if "distances" in batch else None
        p = self._predictive(inputs, distances)
        outside = batch["outside"].tolist() if "outside" in batch else None
        common: dict[str, Any] = {"threshold": self.card.threshold, "outside": outside}
        assert p.samples is not None
        if isinstance(p, CategoricalPredictive):
            return class_answers(
                *(part.numpy() for part in (p.mean, p.total, p.epistemic)),
                classes=self._run.class_names,
                samples=p.samples.numpy(),
                **common,
            )
        lower, upper = (part.flatten().numpy() for part in p.interval(self._level))
        if isinstance(p, CountPredictive):
            lower = lower.clip(min=0.0)
        return number_answers(
            p.mean.flatten().numpy(),
            p.total.sqrt().flatten().numpy(),
            (lower, upper),
            p.epistemic.flatten().numpy(),
            samples=p.samples.flatten(1).numpy(),
            **common,
        )

    def _predictive(self, inputs: Tensor, distances: Tensor | None) -> Predictive:
        found = self._network(inputs)
        if distances is None:
            return found
        assert self._run.table is not None
        target = self._run.table.target
        if target.marginal:
            found = widened(found, distances, torch.tensor(target.marginal))
        return in_units(found, target.shift, target.scale)

    @torch.no_grad()
    def _network(self, inputs: Tensor) -> Predictive:
        if self._frozen is None:
            return self._bnn.predict(inputs, self._num_samples, keep_samples=True)
        outputs = [self._frozen.outputs(part) for part in inputs.split(_AT_ONCE)]
        return self._bnn.likelihood.predictive(torch.cat(outputs, 1), keep_samples=True)

    def _inputs_of(self, pixels: Tensor) -> Tensor:
        """Return inputs (N, D) for pixels (N, height, width) or (N, height, width, 3)."""
        images = self._run.images
        if images is None:
            return pixels.flatten(1) / ImageData.pixel_scale
        channels_first = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
        return images.standardised(channels_first)

    def _threshold(self, coverage: float) -> tuple[float | None, str]:
        """Return the total uncertainty that this share of the held-out examples has at most."""
        try:
            data = self._run.load_data()
        except (ValueError, OSError) as error:
            return None, f"none: the run's data cannot be read: {error}"
        inputs = data.test_inputs[:_MOST_HELD_OUT]
        if not len(inputs):
            return None, "none: the run holds no examples out"
        distances = None
        if isinstance(data, TableData):
            distances = data.test_distances[:_MOST_HELD_OUT]
        totals = self._predictive(inputs, distances).total.flatten().double()
        threshold = float(totals.quantile(coverage, interpolation="higher"))
        return threshold, (
            f"{100.0 * coverage:g} % of {len(inputs):,} held-out examples have a total uncertainty "
            "of at most the threshold"
        )

    def _describe(self, threshold: float | None, origin: str) -> ModelCard:
        run = self._run
        target = "" if run.table is None else run.table.target.name
        rows, images = self._rows, self._images
        return ModelCard(
            name=run.folder.resolve().name,
            source="run",
            task="classification" if run.class_names else "regression",
            input="images" if rows is None else "rows",
            image_shape=[] if images is None else [*images.shape],
            any_size=run.images is not None,
            columns=[] if rows is None else rows.columns,
            unused_columns=[] if rows is None else rows.unused,
            classes=[*run.class_names],
            target=target,
            unit="nats" if run.class_names else f"squared units of {target}",
            num_samples=self._num_samples,
            level=self._level,
            threshold=threshold,
            threshold_origin=origin,
        )


def _frozen(bnn: BayesianModule, num_samples: int) -> FrozenNetwork | None:
    """Return the network with fixed weight samples; None if its likelihood cannot be frozen."""
    try:
        return freeze(bnn, num_samples)
    except TypeError:
        return None


def _row_reader(schema: TableSchema) -> RowReader:
    return RowReader(schema.columns, [*schema.dropped, *schema.carried, schema.target.name])


def _image_reader(schema: ImageSchema | None) -> ImageReader:
    if schema is None:
        size = ImageData.image_shape
        return ImageReader(size, lambda file: decoded_exactly(file, size))

    def decode(file: io.BytesIO) -> Any:
        check_size(file)
        return schema.pixels([file])[0].permute(1, 2, 0).numpy()

    shape = (schema.size, schema.size, schema.channels)
    return ImageReader(shape if schema.channels > 1 else shape[:2], decode)
