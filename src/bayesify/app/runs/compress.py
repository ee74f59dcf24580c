"""Choose the pruned fraction and the step size of a compressed file on held-out examples."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.app.runs.folder import Run
from bayesify.app.runs.measure import evaluate, evaluate_mean, shown, weights_left
from bayesify.app.runs.run_data import RunData
from bayesify.app.runs.run_files import RunError
from bayesify.datasets import IMAGE_DATASETS, load_images
from bayesify.io import encoded_size, model_document
from bayesify.io.compression import Compressed, compressed, decompressed
from bayesify.io.quantization import quantize_means
from bayesify.module.bayesian import BayesianModule
from bayesify.module.pruning import prune
from bayesify.module.shrinking import shrink
from bayesify.noise.keys import Stream, derived_seed

__all__ = ["Choice", "Parts", "choose", "measure_file", "split_parts"]

#: Fractions that are tried: each leaves 0.8 times as many weights as the one before.
FRACTIONS = tuple(1.0 - 0.8**power for power in range(32))
#: Step sizes that are tried, as multiples of the typical std of each parameter.
STEP_SIZES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
#: Most training images beyond ``--limit`` that are used.
_MOST_VALIDATION = 10_000
_TIMED_CALLS = 200


class Parts(NamedTuple):
    """Examples to choose by, and examples to measure the result on.

    Args:
        choosing: its test part is what to choose by; None if nothing is to be chosen.
        chosen_on: what these examples are, in words.
        measuring: its test part, or its training part if it has none, is what to measure on.
        measured_on: what these examples are, in words.
    """

    choosing: RunData | None
    chosen_on: str | None
    measuring: RunData
    measured_on: str

    @property
    def num_measuring(self) -> int:
        """Number of examples to measure on."""
        return len(shown(self.measuring)[1])


@dataclass(frozen=True)
class Choice:
    """The content of a compressed file, and how it was made.

    Args:
        fraction: fraction of the random weights that were pruned.
        step_size: the step size as a multiple of the typical std of each parameter.
        content: bytes of the file.
        size: its size.
    """

    fraction: float
    step_size: float
    content: bytes
    size: Compressed


def split_parts(run: Run, data: RunData, *, choose: bool, data_dir: str | None = None) -> Parts:
    """Return examples that training has not seen, to choose by and to measure on.

    To choose by are the training images beyond the run's ``limit``; if there are none, half of the
    held-out part, drawn by the run's seed, and the other half is to measure on. So no example is
    used for both.

    Args:
        run: the run.
        data: its data.
        choose: whether anything is to be chosen.
        data_dir: look for images only in this folder.

    Raises:
        RunError: something is to be chosen, but less than two examples are held out.
    """
    count = len(data.test_targets)
    if not choose:
        part = "held-out examples" if count else "training examples, as none are held out"
        return Parts(None, None, data, part)
    if run.config.dataset in IMAGE_DATASETS and run.config.limit is not None:
        whole = load_images(run.config.dataset, data_dir or run.data_dir)
        inputs = whole.train_inputs[run.config.limit :][:_MOST_VALIDATION]
        targets = whole.train_targets[run.config.limit :][:_MOST_VALIDATION]
        if len(targets):
            unseen = replace(whole, test_inputs=inputs, test_targets=targets)
            return Parts(unseen, "training images beyond --limit", data, "held-out examples")
    if count < 2:
        raise RunError(
            f"{run.folder} must hold out two examples at least, to choose by and to measure on, "
            f"got {count}; train with --test-fraction, or give both --fraction and --step-size"
        )
    generator = torch.Generator().manual_seed(derived_seed(run.config.seed, Stream.SHUFFLE, 0, 2))
    order = torch.randperm(count, generator=generator)
    first, second = order[: count // 2].sort().values, order[count // 2 :].sort().values
    half = "half of the held-out examples"
    return Parts(_held_out(data, first), half, _held_out(data, second), "the other half")


def choose(
    bnn: BayesianModule,
    data: RunData | None,
    *,
    max_error_rise: float,
    fraction: float | None = None,
    step_size: float | None = None,
    on_trial: Callable[[], None] = lambda: None,
) -> Choice:
    """Return the smallest file whose error rises by ``max_error_rise`` at most.

    For each step size the largest fraction is found by bisection, since a network with fewer
    weights makes more errors, by and large; the smallest of their files is chosen.

    Args:
        bnn: the network.
        data: the error is that of the mean weights on its test part, in percent; of numbers the
            root mean squared error in percent of that of ``bnn``. None if both are given.
        max_error_rise: the most by which the error may rise, in percentage points, or percent of
            the root mean squared error.
        fraction: prune this fraction, and choose the step size only.
        step_size: use this step size, and choose the fraction only.
        on_trial: called before each network that is measured.

    Raises:
        RunError: no network that is tried keeps to ``max_error_rise``.
        TypeError: the network is a point estimate.
    """
    step_sizes = STEP_SIZES if step_size is None else (step_size,)
    fractions = FRACTIONS if fraction is None else (fraction,)
    if data is None:
        return _encoded(bnn, fractions[0], step_sizes[0])
    errors = _Errors(bnn, data)
    least = math.inf

    def holds(fraction: float, step_size: float) -> bool:
        nonlocal least
        on_trial()
        rise = errors.rise(fraction, step_size)
        least = min(least, rise)
        # A rise of exactly the most that is allowed may be rounded up.
        return rise <= max_error_rise + 1e-9

    found: list[Choice] = []
    for each in step_sizes:
        if not holds(fractions[0], each):
            continue
        good, bad = 0, len(fractions)
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if holds(fractions[middle], each) else (good, middle)
        found.append(_encoded(bnn, fractions[good], each))
    if not found:
        raise RunError(
            f"no step size that was tried ({', '.join(f'{each:g}' for each in step_sizes)}) with "
            f"{fractions[0]:g} of the weights removed keeps the rise of the error within "
            f"{max_error_rise:g} {errors.unit}, measured on {len(data.test_targets):,} examples; "
            f"the least was {least:.3g}: allow it with --max-error-rise, or hold out more examples"
        )
    return min(found, key=lambda each: each.size.num_bytes)


def measure_file(
    run: Run, bnn: BayesianModule, choice: Choice, data: RunData
) -> list[dict[str, Any]]:
    """Return a row for the run's predictions, for its mean weights, and for the decoded file.

    Each has the number of weights that are not zero, bytes, the metrics on the test part of
    ``data`` or on its training part if it has none, and for plain networks the milliseconds of one
    example, on the threads that PyTorch is set to use.
    """
    net = decompressed(choice.content, run.make_net())
    decoded = copy.deepcopy(bnn)
    parameters = dict(net.named_parameters())
    with torch.no_grad():
        decoded.posterior.mask = None
        decoded.posterior.mean.copy_(decoded.layout.flatten(parameters))
    averaged, _ = evaluate(bnn, data, num_samples=run.config.test_samples, with_train=False)
    if averaged["test"] is None:
        averaged, _ = evaluate(bnn, data, num_samples=run.config.test_samples)
    example = (data.test_inputs if len(data.test_inputs) else data.train_inputs)[:1]
    weights = weights_left(bnn)
    num_parameters = sum(each.numel() for each in net.parameters())
    return [
        {
            "network": "averaged",
            "weights": weights,
            "bytes": encoded_size(*model_document(bnn)),
            **(averaged["test"] or averaged["train"]),
            "milliseconds": None,
        },
        {
            "network": "mean weights",
            "weights": weights,
            "bytes": 4 * num_parameters,
            **evaluate_mean(bnn, data),
            "milliseconds": _milliseconds(bnn.to_module(), example),
        },
        {
            "network": "file",
            "weights": choice.size.num_nonzero,
            "bytes": choice.size.num_bytes,
            **evaluate_mean(decoded, data),
            "milliseconds": _milliseconds(_shrunk(net, example), example),
        },
    ]


def _shrunk(net: nn.Module, example: Tensor) -> nn.Module:
    """The network without unused units, or itself where these cannot be found."""
    try:
        return shrink(net, example, select_inputs=True)
    except (ValueError, RuntimeError):  # it cannot be traced, or shrinking would change its outputs
        return net


class _Errors:
    """Errors of pruned and quantised mean weights, against that of the whole network's."""

    def __init__(self, bnn: BayesianModule, data: RunData) -> None:
        self._bnn = bnn
        self._inputs, self._targets = data.test_inputs, data.test_targets
        self._is_percent = bool(data.class_names)
        self._whole = self._error(bnn)
        self.unit = "percentage points" if self._is_percent else "percent of the RMSE"

    def rise(self, fraction: float, step_size: float) -> float:
        """Return by how much the error rises, in percentage points or percent."""
        small = prune(self._bnn, fraction)
        weights = {name: each.weights for name, each in quantize_means(small, step_size).items()}
        with torch.no_grad():
            small.posterior.mean.copy_(small.layout.flatten(weights))
        error = self._error(small)
        if self._is_percent:
            return error - self._whole
        if self._whole == 0.0:
            return 0.0 if error == 0.0 else math.inf
        return 100.0 * (math.sqrt(error / self._whole) - 1.0)

    def _error(self, bnn: BayesianModule) -> float:
        return float(bnn.likelihood.error(bnn.mean_outputs(self._inputs), self._targets))


def _encoded(bnn: BayesianModule, fraction: float, step_size: float) -> Choice:
    small = prune(bnn, fraction)
    content, size = compressed(small, step_size=step_size)
    mask = small.posterior.mask
    removed = 0.0 if mask is None else 1.0 - float(mask.double().mean())
    # A network that was pruned in training may lack more than was asked for; a fraction of the
    # weights is rounded to one of them.
    is_asked = abs(removed - fraction) * small.layout.num_weights < 1.0
    return Choice(fraction if is_asked else removed, step_size, content, size)


def _held_out(data: Any, places: Tensor) -> RunData:
    """Return data with some of the held-out examples."""
    names = ("test_inputs", "test_targets", "test_distances")
    some: dict[str, Any] = {
        name: getattr(data, name)[places] for name in names if hasattr(data, name)
    }
    if getattr(data, "test_texts", ()):
        some["test_texts"] = tuple(data.test_texts[place] for place in places.tolist())
    found: RunData = replace(data, **some)
    return found


@torch.no_grad()
def _milliseconds(net: nn.Module, example: Tensor) -> float:
    """Return the median time of a pass of one example, in milliseconds."""
    net.eval()
    times = []
    for _ in range(_TIMED_CALLS):
        started = time.perf_counter()
        net(example)
        times.append(time.perf_counter() - started)
    return 1000.0 * median(times)
