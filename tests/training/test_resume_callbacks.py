"""What a callback changes after an epoch is in the run that is resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases import Case
from tests.training.test_resume import NAME, SETUPS, Setup, Stop
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from bayesify import ELBO
from bayesify.io import read_tensors

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")


class Halving:
    """A callback that halves the learning rate after each epoch."""

    def __init__(self, optimizer: list[Optimizer]) -> None:
        self.optimizer = optimizer

    def on_start(self, **_: Any) -> None: ...

    def on_step(self, **_: Any) -> None: ...

    def on_epoch(self, row: Any) -> None:
        for group in self.optimizer[-1].param_groups:
            group["lr"] = 0.1 * 0.5 ** row["epoch"]


def test_a_rate_set_in_a_callback_is_resumed(tmp_path: Path) -> None:
    made: list[Optimizer] = []

    def optimizer(groups: Any) -> Optimizer:
        made.append(SGD(groups, lr=0.1))
        return made[-1]

    def run(folder: str, *epochs: int) -> dict[str, Tensor]:
        for count in epochs:
            options = {"optimizer": optimizer, "epochs": count, "callback": Halving(made)}
            SETUPS["pruned"].run(tmp_path / folder, scheduler=None, **options)
        return read_tensors(tmp_path / folder / NAME)[0]

    whole, resumed = run("whole", 4), run("resumed", 2, 3, 4)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def edit_mean(elbo: ELBO, optimizer: Optimizer, schedule: LRScheduler) -> None:
    with torch.no_grad():
        elbo.bnn.posterior.mean.mul_(0.5)


def set_mask(elbo: ELBO, optimizer: Optimizer, schedule: LRScheduler) -> None:
    elbo.bnn.posterior.mask = torch.arange(elbo.bnn.posterior.mean.numel()) % 2 == 0


def set_step(elbo: ELBO, optimizer: Optimizer, schedule: LRScheduler) -> None:
    elbo.step += 1


def forget_averages(elbo: ELBO, optimizer: Optimizer, schedule: LRScheduler) -> None:
    optimizer.state[elbo.bnn.posterior.mean]["exp_avg"].zero_()


def add_number(elbo: ELBO, optimizer: Optimizer, schedule: LRScheduler) -> None:
    optimizer.state[elbo.bnn.posterior.mean]["count"] = 3


def lower_rates(elbo: ELBO, optimizer: Optimizer, schedule: LRScheduler) -> None:
    schedule.base_lrs[:] = [0.1 * rate for rate in schedule.base_lrs]


def freeze_rho(elbo: ELBO, optimizer: Optimizer, schedule: LRScheduler) -> None:
    elbo.bnn.posterior.get_parameter("rho").requires_grad_(requires_grad=False)


def freeze_mean(elbo: ELBO, optimizer: Optimizer, schedule: LRScheduler) -> None:
    elbo.bnn.posterior.mean.requires_grad_(requires_grad=False)


CHANGES = [
    edit_mean,
    set_mask,
    set_step,
    forget_averages,
    add_number,
    lower_rates,
    freeze_rho,
    freeze_mean,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_callback_changes_is_resumed(change: Any, tmp_path: Path) -> None:
    def run(folder: str, *epochs: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        for count in epochs:
            setup = Setup(case=Case("gaussian", "mean-field", "categorical"))
            elbo = setup.objective()
            adam = Adam(elbo.parameters(), lr=0.05)
            schedule = LambdaLR(adam, lambda _: 1.0)
            with torch.inference_mode():  # counts no edits
                elbo.register_buffer("unchanged", torch.zeros(1))
            callback = Stop(partial(change, elbo, adam, schedule), epoch=0)
            options = {"optimizer": adam, "scheduler": schedule, "callback": callback}
            setup.run(tmp_path / folder, elbo, epochs=count, **options)
        return read_tensors(tmp_path / folder / NAME)

    (whole, meta), (resumed, its_meta) = run("whole", 2), run("resumed", 1, 2)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert its_meta["optimizer"] == meta["optimizer"]
    assert its_meta["scheduler"] == meta["scheduler"]
