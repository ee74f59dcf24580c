"""The served model of a run: its network, its reader of examples, its threshold of abstention."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from bayesify.app.runs import Run, RunError
from bayesify.app.runs.abstention import MOST_HELD_OUT, threshold_of
from bayesify.app.runs.measure import distinct_samples, in_units, widened_rows
from bayesify.app.serve.answers import check_finite, class_answers, number_answers
from bayesify.app.serve.images import ImageReader, decoded_exactly
from bayesify.app.serve.model import Batch, ModelCard
from bayesify.app.serve.request_rows import RequestRows
from bayesify.app.serve.requests import Examples
from bayesify.datasets import ImageData, ImageSchema
from bayesify.distributions.likelihoods.likelihood import predictive_of
from bayesify.module.bayesian import BayesianModule
from bayesify.module.freezing import FrozenNetwork, freeze
from bayesify.prediction import CategoricalPredictive, CountPredictive, Predictive
from bayesify.tabular.table_data import TableData

__all__ = ["RunModel"]

#: Held-out examples from which the threshold is found with an adapter, whose whole pretrained
#: network runs once for each weight sample.
_MOST_ADAPTED = 200
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
        RunError: a number is out of its range.
        TableError: a pretrained network that the run needs is not there, or is not that of the
            training.
    """

    def __init__(
        self, run: Run, bnn: BayesianModule, *, num_samples: int, level: float, coverage: float
    ) -> None:
        for name, value in (("level", level), ("coverage", coverage)):
            if not 0.0 < value < 1.0:
                raise RunError(f"{name} must lie strictly between 0 and 1, got {value}")
        if num_samples < 1:
            raise RunError(f"samples must be at least 1, got {num_samples}")
        self._run, self._bnn = run, bnn
        self._num_samples = distinct_samples(bnn, num_samples)
        self._level = level
        # A frozen network runs all weight samples at once, which is too much of an adapter's.
        self._frozen = None if run.config.adapter else _frozen(bnn, self._num_samples)
        self._table: RequestRows | None = None
        self._images: ImageReader | None = None
        if run.table is None:
            self._images = _image_reader(run.images)
        else:
            # Without a target on the command line the table is a folder of images.
            self._table = RequestRows(run.table, only_images=run.config.target is None)
        self.card = self._describe(*self._threshold(coverage))

    def read(self, examples: Examples) -> Batch:
        """Return ``inputs`` (N, D); for a table the values of each column by its place."""
        if self._table is not None:
            return self._table.read(examples)
        assert self._images is not None
        pixels = torch.from_numpy(self._images.read(examples))
        return {"inputs": self._inputs_of(pixels).numpy()}

    def predict(self, batch: Batch) -> list[dict[str, Any]]:
        """Return the answers, from the same weight samples in every call."""
        if self._table is None:
            p, outside = self._predictive(torch.from_numpy(batch["inputs"]), None), None
        else:
            inputs, distances, outside = self._table.encode(batch)
            p = self._predictive(inputs, distances)
        common: dict[str, Any] = {"threshold": self.card.threshold, "outside": outside}
        assert p.samples is not None
        # Few samples of counts are repeated as a whole where a row of the batch lies outside, and
        # each copy is moved by another number.
        samples = p.samples.double().unflatten(0, (-1, self._num_samples)).mean(0)
        if isinstance(p, CategoricalPredictive):
            return class_answers(
                *(part.numpy() for part in (p.mean, p.total, p.epistemic)),
                classes=self._run.class_names,
                samples=samples.numpy(),
                **common,
            )
        check_finite(p.mean.numpy(), p.total.numpy())  # of NaN, counts have no quantiles
        lower, upper = (part.flatten().numpy() for part in p.interval(self._level))
        if isinstance(p, CountPredictive):
            lower = lower.clip(min=0.0)
        return number_answers(
            p.mean.flatten().numpy(),
            p.total.sqrt().flatten().numpy(),
            (lower, upper),
            p.epistemic.flatten().numpy(),
            samples=samples.flatten(1).numpy(),
            **common,
        )

    def _predictive(self, inputs: Tensor, distances: Tensor | None) -> Predictive:
        found = self._network(inputs)
        if distances is None:
            return found
        assert self._run.table is not None
        target = self._run.table.target
        found = widened_rows(found, distances, target.marginal)
        return in_units(found, target.shift, target.scale)

    @torch.no_grad()
    def _network(self, inputs: Tensor) -> Predictive:
        if self._frozen is None:
            return self._bnn.predict(inputs, self._num_samples, keep_samples=True)
        outputs = [self._frozen.outputs(part) for part in inputs.split(_AT_ONCE)]
        return predictive_of(self._bnn.likelihood, torch.cat(outputs, 1), keep_samples=True)

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
        most = _MOST_ADAPTED if self._run.config.adapter else MOST_HELD_OUT
        inputs = data.test_inputs[:most]
        if not len(inputs):
            return None, "none: the run holds no examples out"
        distances = None
        if isinstance(data, TableData):
            distances = data.test_distances[:most]
        threshold = threshold_of(self._predictive(inputs, distances).total, coverage)
        return threshold, (
            f"{100.0 * coverage:g} % of {len(inputs):,} held-out examples have a total uncertainty "
            "of at most the threshold"
        )

    def _describe(self, threshold: float | None, origin: str) -> ModelCard:
        run = self._run
        table, images = self._table, self._images
        has_rows = table is not None and not table.only_images
        target = run.table.target.name if run.table is not None and has_rows else ""
        return ModelCard(
            name=run.folder.resolve().name,
            source="run",
            task="classification" if run.class_names else "regression",
            input="rows" if has_rows else "images",
            image_shape=[] if images is None else [*images.shape],
            any_size=run.images is not None or (table is not None and table.only_images),
            draws_digits=images is not None and run.config.dataset == "mnist",
            columns=[] if table is None else table.columns,
            unused_columns=[] if table is None else table.unused,
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


def _image_reader(schema: ImageSchema | None) -> ImageReader:
    if schema is None:
        size = ImageData.image_shape
        return ImageReader(size, lambda file: decoded_exactly(file, size))

    def decode(file: io.BytesIO) -> Any:
        return schema.pixels([file])[0].permute(1, 2, 0).numpy()

    shape = (schema.size, schema.size, schema.channels)
    return ImageReader(shape if schema.channels > 1 else shape[:2], decode)
