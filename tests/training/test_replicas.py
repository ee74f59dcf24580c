"""K networks at once are what each would have become alone."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loops import loop_over
from torch import Tensor, nn

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.module.pruning import prune_in_place
from bayesify.training import fit_replicas
from bayesify.training.history import EpochRow, History
from bayesify.training.kernel import compiler
from bayesify.training.kernel.compiler import find_compiler
from bayesify.training.progress import Callback

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning"),
]


COUNT, NUM_DATA, EPOCHS = 3, 96, 3


class ConvNet(nn.Module):
    """With parameters that stay deterministic, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.relu(self.norm(self.conv(x))).flatten(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Tanh(), nn.Linear(10, 5))


def data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NUM_DATA, 1, 8, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (NUM_DATA,), generator=generator)


def loader(seed: int = 0) -> TensorLoader:
    return TensorLoader(*data(seed), 40, seed=seed)


def elbos(make: Callable[[], nn.Module]) -> list[bf.ELBO]:
    """Of different initial values, seeds, priors, temperatures."""
    made = []
    for k in range(COUNT):
        torch.manual_seed(k)
        prior = bf.ScaleMixture(std1=1.0 + k, std2=0.05)
        bnn = bf.BayesianModule(make().double(), prior=prior, init_std=0.01 * (k + 1), seed=k)
        made.append(bf.ELBO(bnn, num_data=NUM_DATA, temperature=1.0 - 0.1 * k))
    return made


OPTIMIZERS = {
    "adam": [functools.partial(torch.optim.Adam, lr=1e-3 * (k + 1)) for k in range(COUNT)],
    "sgd": [
        functools.partial(torch.optim.SGD, lr=1e-2 * (k + 1), momentum=0.9) for k in range(COUNT)
    ],
}


def without_times(row: EpochRow) -> EpochRow:
    return {k: value for k, value in row.items() if "second" not in k and value is not None}


def assert_same(joint: bf.ELBO, history: History, alone: bf.ELBO, own: History) -> None:
    state = alone.bnn.state_dict()
    for name, tensor in joint.bnn.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-11, atol=1e-13)
    for row, other in zip(history, own, strict=True):
        assert without_times(row) == pytest.approx(without_times(other), rel=1e-9)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize("make", [mlp, ConvNet])
def test_each_network_is_what_it_becomes_alone(
    make: Callable[[], nn.Module], rule: str, separate: bool
) -> None:
    loaders = [loader(k if separate else 0) for k in range(COUNT)]
    settings = {"epochs": EPOCHS, "rho_lr_scale": 2.0}
    settings |= {"kl_warmup_epochs": 1, "kl_warmup_power": 2.0}
    joint = elbos(make)
    histories = fit_replicas(
        joint,
        loaders if separate else loaders[0],
        loader(9),
        optimizer=OPTIMIZERS[rule],
        progress=False,
        **settings,
    )
    for k, alone in enumerate(elbos(make)):
        optimizer = OPTIMIZERS[rule][k]
        own = bf.fit(
            alone, loaders[k], loader(9),
            **{"optimizer": optimizer, "backend": "compiled", "progress": False, **settings},
        )  # fmt: skip
        assert_same(joint[k], histories[k], alone, own)


def test_a_network_that_was_trained_before_goes_on_with_other_orders_of_its_data() -> None:
    joint, alone = elbos(mlp), elbos(mlp)
    loaders = [loader(k) for k in range(len(joint))]
    settings: dict[str, Any] = {"epochs": 1, "progress": False, "backend": "compiled"}
    for each in (joint[1], alone[1]):
        bf.fit(each, loaders[1], **settings)
    histories = bf.fit_replicas(joint, loaders, **settings)
    for k, each in enumerate(alone):
        assert_same(joint[k], histories[k], each, bf.fit(each, loaders[k], **settings))


def of_estimator(estimator: bf.Estimator, prior: bf.Prior) -> list[bf.ELBO]:
    made = []
    for k in range(COUNT):
        torch.manual_seed(k)
        bnn = bf.BayesianModule(
            mlp().double(), prior=prior, init_std=0.05, estimator=estimator, seed=k
        )
        made.append(bf.ELBO(bnn, num_data=NUM_DATA))
    return made


BY_GROUP = bf.ByGroup({"*.bias": bf.Gaussian(1.0), "*": bf.Laplace(0.3)})


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize(
    ("estimator", "prior", "backend"),
    [
        (bf.LocalReparameterization(), bf.Gaussian(0.3), "compiled"),
        (bf.LocalReparameterization(), bf.ScaleMixture(std2=0.05), "compiled"),
        (bf.Flipout(), bf.Laplace(0.3), "compiled"),
        (bf.LocalReparameterization(), BY_GROUP, "autograd"),
        (bf.WeightSampling(), bf.StudentT(), "autograd"),
    ],
    ids=str,
)
def test_each_estimator_is_what_it_becomes_alone(
    estimator: bf.Estimator, prior: bf.Prior, backend: str, separate: bool
) -> None:
    loaders = [loader(k if separate else 0) for k in range(COUNT)]
    settings: dict[str, Any] = {"epochs": 2, "progress": False, "kl_warmup_epochs": 1}
    joint = of_estimator(estimator, prior)
    histories = fit_replicas(joint, loaders if separate else loaders[0], **settings)
    for k, alone in enumerate(of_estimator(estimator, prior)):
        own = bf.fit(alone, loaders[k], **settings, backend=backend)  # type: ignore[arg-type]
        if backend == "autograd":  # which knows the KL of every minibatch
            for row in (*histories[k], *own):
                del row["loss"]
        assert_same(joint[k], histories[k], alone, own)
    for elbo in joint:
        mean = elbo.bnn.posterior.mean
        assert mean.untyped_storage().nbytes() == mean.nbytes, "a tensor of its own again"


class OwnObjective(bf.ELBO):
    """Perhaps another objective."""


class Shared(nn.Module):
    """A module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(64), nn.Linear(64, 5)
        self.same = self.norm

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.same(x.flatten(1)))


def test_what_only_the_objectives_own_code_computes_is_refused() -> None:
    own = [OwnObjective(each.bnn, num_data=NUM_DATA) for each in elbos(mlp)]
    with pytest.raises(ValueError, match=r"network 0 .*: the objective is a OwnObjective"):
        fit_replicas(own, loader(), backend="autograd")


def test_an_error_leaves_the_networks_as_they_were() -> None:
    made = of_estimator(bf.LocalReparameterization(), bf.Gaussian(0.3))
    with pytest.raises(ValueError, match="closed-form"):
        fit_replicas(made, loader(), backend="closed-form")
    for elbo in made:
        mean = elbo.bnn.posterior.mean
        assert mean.untyped_storage().nbytes() == mean.nbytes


def test_a_module_under_two_names_and_a_frozen_rho() -> None:
    made = []
    for seed in range(2):
        bnn = bf.BayesianModule(
            Shared().double(), estimator=bf.LocalReparameterization(), seed=seed
        )
        bnn.posterior.get_parameter("rho").requires_grad_(False)
        made.append(bf.ELBO(bnn, num_data=NUM_DATA))
    before = [elbo.bnn.posterior.mean.detach().clone() for elbo in made]
    fit_replicas(made, loader(), epochs=1, backend="autograd", progress=False)
    for elbo, mean in zip(made, before, strict=True):
        assert (elbo.bnn.posterior.mean - mean).abs().max() > 1e-4


def test_the_network_that_diverged_is_named() -> None:
    made = elbos(mlp)
    with torch.no_grad():
        made[2].bnn.posterior.mean[0] = torch.nan
    with pytest.raises(ArithmeticError, match=r"network 2: .* \(epoch 1, minibatch 1\)"):
        fit_replicas(made, loader(), epochs=1, progress=False)


@pytest.mark.parametrize("separate", [False, True])
def test_targets_that_are_nan_are_named(separate: bool) -> None:
    loaders = []
    for seed in range(COUNT):
        x, y = data(seed)
        loaders.append(TensorLoader(x, y.double().unsqueeze(1), 40, seed=seed))
    loaders[2 if separate else 0].targets.fill_(torch.nan)
    made = [
        bf.ELBO(
            bf.BayesianModule(
                nn.Sequential(nn.Flatten(), nn.Linear(64, 1)).double(),
                likelihood=bf.GaussianLikelihood(),
                seed=seed,
            ),
            num_data=NUM_DATA,
        )
        for seed in range(COUNT)
    ]
    message = rf"network {2 if separate else 0}: the nll .* targets of this minibatch are NaN"
    with pytest.raises(ArithmeticError, match=message):
        fit_replicas(made, loaders if separate else loaders[0], epochs=1, progress=False)


def test_without_a_compiler_autograd_trains_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.compiled_library.cache_clear()
    monkeypatch.setattr(compiler, "find_compiler", lambda: None)
    fit_replicas(iter(elbos(mlp)), loader(), epochs=1, progress=False)
    with pytest.raises(compiler.CompilerError, match="needs a C\\+\\+ compiler"):
        fit_replicas(elbos(mlp), loader(), epochs=1, backend="compiled", progress=False)


def test_the_networks_differ() -> None:
    """Else the test above could not fail by mixing them up."""
    joint = elbos(mlp)
    fit_replicas(joint, loader(), epochs=1, progress=False)
    means = [elbo.bnn.posterior.mean for elbo in joint]
    assert (means[0] - means[1]).abs().max() > 1e-2
    assert (means[1] - means[2]).abs().max() > 1e-2


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    whole = elbos(ConvNet)
    histories = fit_replicas(whole, loader(), epochs=3, progress=False)
    first = elbos(ConvNet)
    with pytest.raises(KeyboardInterrupt):
        fit_replicas(first, loader(), epochs=3, checkpoint_dir=tmp_path, callback=Stopping(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"replica-{k}" for k in range(3)]
    again = elbos(ConvNet)
    with pytest.raises(FileExistsError, match="resume=True"):
        fit_replicas(again, loader(), epochs=3, checkpoint_dir=tmp_path, progress=False)
    resumed = fit_replicas(
        again, loader(), epochs=3, checkpoint_dir=tmp_path, resume=True, progress=False
    )
    for k in range(COUNT):  # to rounding: sums over a minibatch depend on where tensors lie
        assert_same(again[k], resumed[k], whole[k], histories[k])
    more = [*elbos(ConvNet), elbos(ConvNet)[0]]
    with pytest.raises(ValueError, match=r"networks \[3\] have no checkpoint, .*as many as before"):
        fit_replicas(more, loader(), epochs=4, checkpoint_dir=tmp_path, resume=True)
    (tmp_path / "replica-1" / "checkpoint.safetensors").unlink()
    with pytest.raises(ValueError, match=r"networks \[1\] have no checkpoint, .*remove the"):
        fit_replicas(elbos(ConvNet), loader(), epochs=4, checkpoint_dir=tmp_path, resume=True)


def test_what_does_not_go_together_is_refused() -> None:
    made = elbos(mlp)
    other = bf.ELBO(bf.BayesianModule(ConvNet().double()), num_data=NUM_DATA)
    cases: list[tuple[str, dict[str, object]]] = [
        (
            "got a sequence of 1; if these are minibatches .*TensorLoader",
            {"train_loader": [loader()]},
        ),
        ("one optimizer for each", {"optimizer": OPTIMIZERS["adam"][:1]}),
        ("at least one objective", {"elbos": []}),
        ("of different networks", {"elbos": [made[0], made[0]]}),
        ("network 1 differs from network 0", {"elbos": [made[0], other]}),
        ("AdamW", {"optimizer": torch.optim.AdamW, "backend": "compiled"}),
        ("no closed-form backend", {"backend": "closed-form"}),
        ("equal numbers", {"train_loader": [loader(), loader(), TensorLoader(*data(0), 30)]}),
    ]
    for message, changed in cases:
        arguments = {"elbos": made, "train_loader": loader(), "progress": False, **changed}
        with pytest.raises(ValueError, match=message):
            fit_replicas(**arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="each network needs its own"):
        fit_replicas(made, loader(), optimizer=torch.optim.Adam(made[0].parameters()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a list of objectives, got one ELBO; train it by"):
        fit_replicas(made[0], loader())
    made[1].num_samples = 2
    with pytest.raises(ValueError, match=r"network 1 .*: its step takes 2 weight samples, not one"):
        fit_replicas(made, loader())
    made[1].num_samples = 1
    made[1].bnn.estimator = bf.LocalReparameterization()
    with pytest.raises(ValueError, match="network 1 differs from network 0"):
        fit_replicas(made, loader())


class Stopping(Callback):
    """Presses Ctrl-C after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def on_step(self, **_: object) -> None:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


class Changing(Callback):
    """Changes each objective after the first epoch."""

    def __init__(self, change: Callable[[bf.ELBO], object], made: list[bf.ELBO]) -> None:
        self.change, self.made = change, made

    def on_epoch(self, row: EpochRow) -> None:
        if row["epoch"] == 1:
            for elbo in self.made:
                self.change(elbo)


def another_prior(elbo: bf.ELBO) -> None:
    elbo.bnn.prior = bf.ScaleMixture(std1=0.1, std2=0.02)


def another_seed(elbo: bf.ELBO) -> None:
    elbo.bnn.seed += 10


def pruned(elbo: bf.ELBO) -> None:
    prune_in_place(elbo.bnn, 0.5)


def monte_carlo(elbo: bf.ELBO) -> None:
    elbo.bnn.prior, elbo.kl = bf.Gaussian(0.1), "monte-carlo"


def another_tensor(elbo: bf.ELBO) -> None:
    mean = elbo.bnn.posterior.mean
    mean.data = 0.5 * mean.data


@loop_over("change", [another_prior, another_seed, pruned, monte_carlo, another_tensor])
def test_networks_that_change_between_epochs_are_what_they_become_alone(
    change: Callable[[bf.ELBO], object],
) -> None:
    joint, settings = elbos(mlp), {"epochs": 3, "optimizer": OPTIMIZERS["adam"][0]}
    histories = fit_replicas(joint, loader(), callback=Changing(change, joint), **settings)
    for k, alone in enumerate(elbos(mlp)):
        callback = Changing(change, [alone])
        own = bf.fit(alone, loader(), backend="compiled", callback=callback, **settings)
        assert_same(joint[k], histories[k], alone, own)


def student_t(elbo: bf.ELBO) -> None:
    elbo.bnn.prior = bf.StudentT()


@loop_over(
    "change, estimator, message",
    [
        (student_t, None, r"network 0 .* any more: the prior is StudentT; undo"),
        (pruned, bf.Flipout(), r"network 0 must not be pruned .* Flipout"),
        (another_tensor, bf.Flipout(), r"network 0 must not get another tensor"),
    ],
)
def test_a_change_that_cannot_be_trained_is_one_error(
    change: Callable[[bf.ELBO], object], estimator: Any, message: str
) -> None:
    made = of_estimator(estimator or bf.WeightSampling(), bf.Gaussian(0.3))
    with pytest.raises(ValueError, match=message):
        fit_replicas(made, loader(), epochs=2, callback=Changing(change, made))


@pytest.mark.parametrize("backend", ["compiled", "autograd"])
def test_the_backend_is_described(backend: Any) -> None:
    made = elbos(mlp)
    optimizers = [torch.optim.Adam(elbo.parameters()) for elbo in made]
    expected = {
        "compiled": "compiled, 3 networks at once (C++; adam, scale-mixture prior)",
        "autograd": "autograd, 3 networks at once",
    }
    replicas = bf.training.backends.ReplicaBackend(made, optimizers, backend)
    assert replicas.description == expected[backend]


@pytest.mark.parametrize("frozen", [(True, False), (False, True)])
def test_each_network_has_its_own_frozen_parameters(frozen: tuple[bool, bool]) -> None:
    def make() -> list[bf.ELBO]:
        made = []
        for k, freezes in enumerate(frozen):
            torch.manual_seed(k)
            bnn = bf.BayesianModule(mlp().double(), include=("3.*",), seed=k)
            bnn.net[1].requires_grad_(not freezes)
            made.append(bf.ELBO(bnn, num_data=NUM_DATA))
        return made

    together, alone = make(), make()
    start = [elbo.bnn.net[1].weight.clone() for elbo in together]
    fit_replicas(together, loader(), epochs=2, progress=False)
    for elbo in alone:
        bf.fit(elbo, loader(), epochs=2, progress=False)
    for one, other, initial, freezes in zip(together, alone, start, frozen, strict=True):
        found = one.bnn.net[1].weight
        assert torch.equal(found, initial) == freezes == (found.grad is None)
        torch.testing.assert_close(found, other.bnn.net[1].weight, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(
            one.bnn.posterior.mean, other.bnn.posterior.mean, rtol=1e-9, atol=1e-12
        )
