"""Lightning's Trainer: the weights of ``fit``, and of an uninterrupted run."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.docs.test_snippets import run_snippets
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.training import ConvergenceWarning
from bayesify.training.schedules import cosine

lightning = pytest.importorskip("lightning.pytorch")

from bayesify.integrations.lightning import ELBOModule  # noqa: E402 (where lightning is there)

Trainer = lightning.Trainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

N, BATCH, EPOCHS = 48, 8, 4
X = torch.linspace(-2.0, 2.0, 3 * N).view(N, 3).sin()
Y = torch.arange(N) * 7 % 4


def loader(*, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), BATCH, shuffle=shuffle)


def objective() -> bf.ELBO:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 4))
    return bf.ELBO(bf.BayesianModule(net, seed=3), num_data=N)


def trainer(folder: Path, **options: Any) -> Any:
    return Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": EPOCHS, "enable_checkpointing": False, **options},
    )


def weights_of(elbo: bf.ELBO) -> list[Tensor]:
    return [parameter.detach() for parameter in elbo.parameters()]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": partial(SGD, lr=0.2, momentum=0.5), "scheduler": cosine},
        {"rho_lr_scale": 3.0, "kl_warmup_epochs": 2.5, "kl_warmup_power": 2.0},
        # 6 minibatches an epoch: the last step has 2 only.
        {"optimizer": partial(SGD, lr=0.2), "accumulate_batches": 4},
    ],
)
def test_the_weights_are_those_of_fit(options: dict[str, Any], tmp_path: Path) -> None:
    accumulated = options.get("accumulate_batches", 1)
    own = {name: each for name, each in options.items() if name != "accumulate_batches"}
    module = ELBOModule(objective(), **own)
    trainer(tmp_path, accumulate_grad_batches=accumulated).fit(module, loader())
    alone, plain = objective(), objective()
    bf.fit(alone, loader(), epochs=EPOCHS, **options)
    for found, expected in zip(weights_of(module.elbo), weights_of(alone), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    if options:
        bf.fit(plain, loader(), epochs=EPOCHS)
        assert not torch.allclose(weights_of(plain)[0], weights_of(alone)[0], rtol=1e-3)


@pytest.mark.parametrize(
    ("warmup", "options", "is_told"),
    [
        (4.0, {}, True),
        (3.9, {}, False),
        (4.0, {"fast_dev_run": True}, False),  # which trains one minibatch
        (4.0, {"max_epochs": -1, "max_steps": 2}, False),
    ],
)
def test_a_warm_up_as_long_as_training_is_told(
    warmup: float, options: dict[str, Any], is_told: bool, tmp_path: Path
) -> None:
    module = ELBOModule(objective(), kl_warmup_epochs=warmup)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        trainer(tmp_path, **options).fit(module, loader())
    found = [str(each.message) for each in caught if each.category is ConvergenceWarning]
    assert len(found) == is_told
    assert not found or "takes 4 epochs and training only 4: the objective never" in found[0]


def test_a_schedule_of_one_rate_for_all_undoes_no_scale(tmp_path: Path) -> None:
    def schedule(optimizer: Optimizer, steps: int) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=0.05, total_steps=steps)

    module = ELBOModule(objective(), scheduler=schedule, rho_lr_scale=10.0)
    with pytest.raises(ValueError, match="rho_lr_scale must be 1 under a OneCycleLR"):
        trainer(tmp_path).fit(module, loader())


@pytest.mark.parametrize("name", ["Adam", "IVON"])
def test_a_resumed_run_ends_as_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    def made() -> ELBOModule:
        elbo = objective()
        # Lightning restores the network before it makes the optimiser.
        ivon = partial(bf.IVON, elbo, lr=0.1, betas=(0.9, 0.9))
        return ELBOModule(elbo, **({"optimizer": lambda _: ivon()} if name == "IVON" else {}))

    whole = made()
    trainer(tmp_path).fit(whole, loader())
    first = trainer(tmp_path, max_epochs=2, enable_checkpointing=True)
    first.fit(made(), loader())
    path = tmp_path / "half.ckpt"
    first.save_checkpoint(path)
    resumed = made()
    trainer(tmp_path).fit(resumed, loader(), ckpt_path=path)
    for found, expected in zip(weights_of(resumed.elbo), weights_of(whole.elbo), strict=True):
        assert torch.equal(found, expected)


def dropping() -> bf.ELBO:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Dropout(0.3), nn.Linear(7, 4))
    return bf.ELBO(bf.BayesianModule(net, seed=3), num_data=N)


def test_dropout_and_the_order_of_the_data_are_those_of_fit(tmp_path: Path) -> None:
    whole, fitted = ELBOModule(dropping()), dropping()
    before = torch.get_rng_state()
    trainer(tmp_path).fit(whole, TensorLoader(X, Y, BATCH))
    assert torch.equal(torch.get_rng_state(), before)
    bf.fit(fitted, TensorLoader(X, Y, BATCH), epochs=EPOCHS)
    for found, expected in zip(weights_of(whole.elbo), weights_of(fitted), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    first, resumed = ELBOModule(dropping()), ELBOModule(dropping())
    half = trainer(tmp_path, max_epochs=2, enable_checkpointing=True)
    half.fit(first, TensorLoader(X, Y, BATCH))
    half.save_checkpoint(path := tmp_path / "half.ckpt")
    torch.rand(5)
    trainer(tmp_path).fit(resumed, TensorLoader(X, Y, BATCH), ckpt_path=path)
    for found, expected in zip(weights_of(resumed.elbo), weights_of(whole.elbo), strict=True):
        assert torch.equal(found, expected)


def test_a_second_run_has_other_masks_and_orders_as_that_of_fit(tmp_path: Path) -> None:
    whole, fitted, resumed = ELBOModule(dropping()), dropping(), ELBOModule(dropping())
    for _ in range(2):
        trainer(tmp_path, max_epochs=2).fit(whole, TensorLoader(X, Y, BATCH))
        bf.fit(fitted, TensorLoader(X, Y, BATCH), epochs=2)
    for found, expected in zip(weights_of(whole.elbo), weights_of(fitted), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    # As one Trainer that goes on counting.
    same, alone = ELBOModule(dropping()), trainer(tmp_path, max_epochs=2)
    alone.fit(same, TensorLoader(X, Y, BATCH))
    alone.fit_loop.max_epochs = 4
    alone.fit(same, TensorLoader(X, Y, BATCH))
    for found, expected in zip(weights_of(same.elbo), weights_of(whole.elbo), strict=True):
        assert torch.equal(found, expected)
    # The second run, interrupted after an epoch.
    trainer(tmp_path, max_epochs=2).fit(resumed, TensorLoader(X, Y, BATCH))
    second = trainer(tmp_path, max_epochs=1, enable_checkpointing=True)
    second.fit(resumed, TensorLoader(X, Y, BATCH))
    second.save_checkpoint(tmp_path / "half.ckpt")
    again = ELBOModule(dropping())
    trainer(tmp_path, max_epochs=2).fit(
        again, TensorLoader(X, Y, BATCH), ckpt_path=tmp_path / "half.ckpt"
    )
    for found, expected in zip(weights_of(again.elbo), weights_of(whole.elbo), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("mode", ["whole in evaluation", "frozen part in evaluation"])
def test_modes_are_those_of_fit(mode: str, tmp_path: Path) -> None:
    def made() -> bf.ELBO:
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(3, 7, bias=False), nn.BatchNorm1d(7), nn.ReLU())
        net = nn.Sequential(body, nn.Linear(7, 4))
        if mode.startswith("whole"):
            net.eval()
        else:
            body.requires_grad_(False).eval()
        return bf.ELBO(bf.BayesianModule(net, include=["1.*"], seed=3), num_data=N)

    module, fitted = ELBOModule(made()), made()
    trainer(tmp_path).fit(module, loader())
    bf.fit(fitted, loader(), epochs=EPOCHS)
    found, expected = module.elbo.bnn.net.state_dict(), fitted.bnn.net.state_dict()
    moved = float(expected["0.1.running_mean"].abs().max()) > 0.0
    assert moved == mode.startswith("whole")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    for one, other in zip(weights_of(module.elbo), weights_of(fitted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_another_number_of_minibatches_is_refused(tmp_path: Path) -> None:
    bnn = objective().bnn
    elbo = bf.ELBO(bnn, num_data=N, kl_weighting="geometric", num_batches=7)
    with pytest.raises(ValueError, match="num_batches must be the loader's 6, got 7"):
        trainer(tmp_path).fit(ELBOModule(elbo), loader())


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """The data, without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(TensorDataset(X, Y))


@pytest.mark.parametrize(
    "options",
    [
        {"kl_warmup_epochs": 2.5, "kl_warmup_power": 2.0},
        {"optimizer": partial(SGD, lr=0.2), "scheduler": cosine},
    ],
)
def test_a_stream_is_as_the_data_of_a_length(options: dict[str, Any], tmp_path: Path) -> None:
    modules = [ELBOModule(objective(), **options) for _ in range(2)]
    for module, each in zip(modules, (loader(), DataLoader(Stream(), BATCH)), strict=True):
        trainer(tmp_path).fit(module, each)
    for found, expected in zip(*(weights_of(m.elbo) for m in modules), strict=True):
        assert torch.equal(found, expected)


def test_a_schedule_without_an_end_is_refused(tmp_path: Path) -> None:
    module = ELBOModule(objective(), scheduler=cosine)
    with pytest.raises(ValueError, match="a schedule needs the number of steps"):
        trainer(tmp_path, max_epochs=-1).fit(module, DataLoader(Stream(), BATCH))


def test_another_number_of_data_is_refused(tmp_path: Path) -> None:
    elbo = objective()
    elbo.num_data = 100
    with pytest.raises(ValueError, match="must be the number of training examples, 48, got 100"):
        trainer(tmp_path).fit(ELBOModule(elbo), loader())


@pytest.mark.parametrize("samples", [0, 5])
def test_what_is_logged_is_in_nats(samples: int, tmp_path: Path) -> None:
    elbo = objective()
    before = copy.deepcopy(elbo)
    made = trainer(tmp_path, max_epochs=1, max_steps=1)
    made.fit(ELBOModule(elbo, val_samples=samples), loader())
    expected = before(X[:BATCH], Y[:BATCH])
    for name in ("loss", "nll", "kl"):
        assert float(made.logged_metrics[name]) == pytest.approx(
            float(getattr(expected, name).detach()), rel=1e-4
        )
    p = elbo.bnn.predict(X, samples) if samples else elbo.bnn.predict_mean(X)
    nll = pytest.approx(-float(p.log_prob(Y).mean()), rel=1e-4)
    module = ELBOModule(elbo, val_samples=samples)
    assert made.validate(module, loader(), verbose=False) == [{"val_nll": nll}]
    assert made.test(module, loader(), verbose=False) == [{"test_nll": nll}]


def test_predictions(tmp_path: Path) -> None:
    module = ELBOModule(objective())
    expected = module.elbo.bnn.predict(X[:BATCH])
    named = [(x, f"{number}.png") for number, x in enumerate(X)]  # inputs and what is no tensor
    for data in (
        loader(),
        DataLoader(TensorDataset(X), BATCH),
        DataLoader(X, BATCH),
        DataLoader(named, BATCH),  # type: ignore[arg-type]
    ):
        found = trainer(tmp_path).predict(module, data)[0]
        for name in ("mean", "prediction", "total", "aleatoric", "epistemic"):
            torch.testing.assert_close(found[name], getattr(expected, name))
    torch.testing.assert_close(module(X[:BATCH]).mean, expected.mean)
    triples = DataLoader(TensorDataset(X, Y, Y), BATCH)
    with pytest.raises(ValueError, match="a minibatch must be inputs, a pair"):
        trainer(tmp_path).predict(module, triples)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lightning, "Trainer", partial(trainer, tmp_path))
    names = {
        "net": nn.Linear(3, 4),
        "dataset": TensorDataset(X, Y),
        "torch": torch,
        "train_loader": loader(),
        "validation_loader": loader(),
        "loader": loader(),
    }
    run_snippets("docs/lightning.md", names)
    assert (tmp_path / "model.safetensors").exists()


def test_the_rate_of_the_default_optimizer_is_given_or_found(tmp_path: Path) -> None:
    from lightning.pytorch.tuner import Tuner

    module = ELBOModule(objective(), lr=0.02, rho_lr_scale=2.0)
    before = weights_of(copy.deepcopy(module.elbo))
    runs = trainer(tmp_path)
    rates = [group["lr"] for group in module.configure_optimizers().param_groups]
    assert rates == [0.02, 0.04]
    found = Tuner(runs).lr_find(module, loader(), num_training=20, early_stop_threshold=None)
    assert module.lr == found.suggestion() != 0.02
    # What the search trained is undone.
    for now, then in zip(weights_of(module.elbo), before, strict=True):
        assert torch.equal(now, then)
    runs.fit(module, loader())
    assert runs.optimizers[0].param_groups[0]["lr"] == module.lr
    with pytest.raises(ValueError, match="lr is the rate of the default optimiser; leave it out"):
        ELBOModule(objective(), lr=0.1, optimizer=SGD)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="elbo must be an ELBO, got Linear"):
        ELBOModule(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="val_samples must be at least 0, got -1"):
        ELBOModule(objective(), val_samples=-1)
    with pytest.raises(TypeError, match=r"val_samples must be a whole number, got 2\.5"):
        ELBOModule(objective(), val_samples=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lr must be positive and finite, got -1\.0"):
        ELBOModule(objective(), lr=-1.0)
    with pytest.raises(ValueError, match="rho_lr_scale must be positive and finite, got 0"):
        ELBOModule(objective(), rho_lr_scale=0.0)


@pytest.mark.parametrize("samples", [0, 3])
def test_the_nll_of_tokens_is_summed_over_those_that_count(samples: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    likelihood = bf.CategoricalLikelihood(ignore_index=-100)
    bnn = bf.BayesianModule(nn.Linear(3, 4), init_std=1e-6, likelihood=likelihood)
    x, y = X.view(12, 4, 3), Y.view(12, 4).clone()
    y[:, -1] = -100
    module = ELBOModule(bf.ELBO(bnn, num_data=12), val_samples=samples)
    [found] = trainer(tmp_path).validate(module, DataLoader(TensorDataset(x, y), 12))
    logits = bnn.predict_mean(x).mean.log()
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum"
    )
    assert found["val_nll"] == pytest.approx(float(expected) / 12, rel=1e-4)


def test_the_data_of_one_process_are_not_all(tmp_path: Path) -> None:
    data = TensorDataset(X, Y)
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=0)
    elbo = objective()
    elbo.num_data = N // 2
    with pytest.raises(ValueError, match=f"the number of training examples, {N}, got {N // 2}"):
        trainer(tmp_path).fit(ELBOModule(elbo), DataLoader(data, BATCH, sampler=sampler))


class Graph(nn.Module):
    """A layer whose outputs at a node are summed over its edges."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        outputs: Tensor = self.layer(nodes)
        return outputs.index_add(0, edges[:, 1], outputs[edges[:, 0]])


@pytest.mark.parametrize("samples", [0, 3])
def test_a_graph_is_trained_and_validated(samples: int, tmp_path: Path) -> None:
    def elbo() -> bf.ELBO:
        torch.manual_seed(0)
        return bf.ELBO(bf.BayesianModule(Graph()), num_data=N)

    data = [((X, torch.arange(20).view(10, 2)), Y)]
    graphs: Any = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    module, alone = ELBOModule(elbo(), val_samples=samples), elbo()
    made = trainer(tmp_path)
    made.fit(module, graphs, [graphs, graphs])
    bf.fit(alone, graphs, epochs=EPOCHS)
    torch.testing.assert_close(weights_of(module.elbo)[0], weights_of(alone)[0])
    p = alone.bnn.predict(data[0][0], samples or 1, batch_size="all")
    if not samples:
        p = alone.bnn.predict_mean(data[0][0], batch_size="all")
    for place in (0, 1):
        found = made.logged_metrics[f"val_nll/dataloader_idx_{place}"]
        assert float(found) == pytest.approx(-float(p.log_prob(Y).mean()), rel=1e-4)
    [first], _ = made.predict(module, [graphs, graphs])
    assert first["mean"].shape == (N, 4)


def test_the_default_optimizer_clips_gradients_under_mixed_precision(tmp_path: Path) -> None:
    elbo = objective()
    before = copy.deepcopy(weights_of(elbo))
    clipped = trainer(tmp_path, max_epochs=1, precision="bf16-mixed", gradient_clip_val=1.0)
    clipped.fit(ELBOModule(elbo), loader())
    assert not any(torch.equal(*pair) for pair in zip(before, weights_of(elbo), strict=True))
