"""Loaders of streams, which have no length, and minibatches that are no pairs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loops import loop_over
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

import bayesify as bf
from bayesify.training import ShortStreamWarning
from bayesify.training.progress import Callback
from bayesify.training.schedules import cosine

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")

N = 10
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The rows one after the other, as often as asked for."""

    def __init__(self, times: int = 1) -> None:
        self.times = times

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.times):
            yield from zip(X, Y, strict=True)


def elbo() -> bf.ELBO:
    torch.manual_seed(0)
    return bf.ELBO(bf.BayesianModule(nn.Linear(3, 2)), num_data=N)


def weights(loader: Any, **options: Any) -> Tensor:
    objective = elbo()
    bf.fit(objective, loader, epochs=3, **options)
    return objective.bnn.posterior.mean.detach()


@pytest.mark.parametrize("times", [1, 2])
def test_a_stream_trains_as_its_rows_do(times: int) -> None:
    """A longer stream ends after N examples; the last minibatch is then a whole one."""
    found = weights(DataLoader(Stream(times), batch_size=5))
    assert torch.equal(found, weights(DataLoader(TensorDataset(X, Y), batch_size=5)))


def test_a_stream_that_is_shorter_than_told_is_named() -> None:
    objective = bf.ELBO(bf.BayesianModule(nn.Linear(3, 2)), num_data=3 * N)
    with pytest.warns(ShortStreamWarning, match="after 3 minibatches .* num_data of 30") as said:
        bf.fit(objective, DataLoader(Stream(), batch_size=4), epochs=3, progress=False)
    assert [each.category for each in said].count(ShortStreamWarning) == 1
    # A sampler may draw what it likes: N is the number of the data, not of the draws.
    sampler = SubsetRandomSampler(range(5))
    loader = DataLoader(TensorDataset(X, Y), batch_size=5, sampler=sampler)
    bf.fit(elbo(), loader, epochs=1, progress=False)


def test_a_stream_validates_and_ends_early() -> None:
    loader = DataLoader(Stream(), batch_size=4)
    objective = elbo()
    history = bf.fit(objective, loader, loader, epochs=2)
    assert objective.step == 2 * 3
    assert history[-1]["validation_nll"] is not None
    assert history[-1]["train_error"] is not None


def test_a_stream_goes_on_within_an_epoch(tmp_path: Path) -> None:
    class Stopping(Callback):
        def on_start(self, **_: object) -> None: ...
        def on_epoch(self, *_: object) -> None: ...

        def on_step(self, *, epoch: int, batch: int) -> None:
            if (epoch, batch) == (1, 0):
                raise OSError("stopped")

    loader = DataLoader(Stream(), batch_size=4)
    folder = {"checkpoint_dir": tmp_path}
    with pytest.raises(OSError, match="stopped"):
        weights(loader, callback=Stopping(), **folder)
    assert torch.equal(weights(loader, resume=True, **folder), weights(loader))


def test_a_stream_that_drops_its_last_minibatch_has_its_number() -> None:
    rates: list[float] = []

    def sgd(groups: Any) -> SGD:
        made = SGD(groups, lr=0.1)
        made.register_step_post_hook(lambda *_: rates.append(made.param_groups[0]["lr"]))
        return made

    def run(data: Any) -> bf.ELBO:
        objective = elbo()
        loader = DataLoader(data, batch_size=4, drop_last=True)
        bf.fit(objective, loader, epochs=2, scheduler=cosine, optimizer=sgd, progress=False)
        return objective

    streamed, indexed = run(Stream()), run(TensorDataset(X, Y))
    assert streamed.step == indexed.step == 4
    assert rates[:4] == rates[4:]
    # A stream without end brings a minibatch, however few examples are told.
    few = bf.ELBO(bf.BayesianModule(nn.Linear(3, 2)), num_data=3)
    bf.fit(few, DataLoader(Stream(times=9), batch_size=4, drop_last=True), epochs=2)
    assert few.step == 2


class Shard(Stream):
    """Each worker brings rows of its own."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        yield from list(super().__iter__())[worker.id :: worker.num_workers]


class SizedShard(Shard):
    def __len__(self) -> int:
        return N


# Other tests may have loaded JAX, which warns of its threads; the workers do not use it.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize(("stream", "batch_size"), [(Shard(), 8), (SizedShard(), 8)])
def test_the_workers_of_a_stream_bring_all(stream: Shard, batch_size: int) -> None:
    """Each of two workers has half of the rows, and a last minibatch that is not full."""
    objective = elbo()
    bf.fit(objective, DataLoader(stream, batch_size, num_workers=2), epochs=1)
    assert objective.step == 2, "one minibatch of five rows from each"


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize(
    ("batch_size", "rows", "steps"), [(4, 5, 2), (2, 5, 4), pytest.param(2, 2, 2, id="short")]
)
def test_workers_may_each_drop_a_minibatch(batch_size: int, rows: int, steps: int) -> None:
    """Each of two workers has five rows, the last of which it drops, or fewer."""

    class Few(Shard):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            yield from islice(super().__iter__(), rows)

    objective = elbo()
    loader = DataLoader(Few(), batch_size, num_workers=2, drop_last=True)
    with pytest.warns(ShortStreamWarning) if 2 * rows < N else nullcontext():
        bf.fit(objective, loader, epochs=1)
    assert objective.step == steps


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
# PyTorch's own, which says nothing of the minibatches that are left out.
@pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning")
def test_a_length_of_one_worker_is_told_where_two_bring_more() -> None:
    objective = elbo()
    loader = DataLoader(SizedShard(), batch_size=4, num_workers=2)
    with pytest.warns(
        UserWarning, match=r"more minibatches than its length of 3, at which an epoc"
    ):
        bf.fit(objective, loader, epochs=1)
    assert objective.step == 3


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_stream_without_end_ends_at_num_data() -> None:
    class Endless(Stream):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            while True:
                yield from super().__iter__()

    objective = elbo()
    bf.fit(objective, DataLoader(Endless(), batch_size=5, num_workers=2), epochs=1)
    assert objective.step == 3


def test_replicas_take_a_stream() -> None:
    objectives = [elbo(), elbo()]
    bf.fit_replicas(objectives, DataLoader(Stream(), batch_size=4), epochs=2)
    assert [each.step for each in objectives] == [6, 6]


class Endless:
    """Neither a length nor a batch size."""

    def __iter__(self) -> Iterator[Any]:
        yield X, Y


def pairs_of(*tensors: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=5)


@loop_over(
    ("loader", "kind", "message"),
    [
        (Endless(), TypeError, "its length, or by a batch_size, got a Endless without both"),
        (pairs_of(X), ValueError, r"a pair \(inputs, targets\), got 1 \(Tensor\)"),
        (pairs_of(X, X, Y), ValueError, r"got 3 \(Tensor, .*one tuple: \(\(x, z\), y\)"),
    ],
)
def test_other_loaders(loader: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        bf.fit(elbo(), loader, epochs=1)


def test_a_stream_may_be_predicted() -> None:
    bnn = elbo().bnn
    assert torch.equal(bnn.predict(pairs_of(X, Y)).mean, bnn.predict(X).mean)


class Empty(IterableDataset[tuple[Tensor, Tensor]]):
    """No rows, which is known only when they are asked for."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from ()


def test_a_stream_without_minibatches_is_named() -> None:
    elbo = bf.ELBO(bf.BayesianModule(nn.Linear(3, 2)), num_data=N)
    stream, empty = DataLoader(Stream(), 5), DataLoader(Empty(), 5)
    with pytest.raises(ValueError, match="the training loader must bring at least one minibatch"):
        bf.fit(elbo, empty, epochs=1, progress=False)
    with pytest.raises(ValueError, match="the validation loader must bring at least one minibatch"):
        bf.fit(elbo, stream, empty, epochs=1, progress=False)
    with pytest.raises(TypeError, match="fit_replicas needs an ELBO, got BayesianModule"):
        bf.fit_replicas([elbo.bnn], stream, epochs=1)  # type: ignore[list-item]
