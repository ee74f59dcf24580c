"""What one does with a network on a GPU: train, resume, predict, prune, save, certify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.app.cli.test_cli import bayesify
from tests.cases import LIKELIHOODS, POSTERIORS, PRIORS, Case, normals
from tests.gpu.device import COMPILER_WARNING, DEVICE, needs_gpu
from torch import Tensor, nn

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.training.ivon import IVON

pytestmark = [
    needs_gpu,
    COMPILER_WARNING,
    pytest.mark.filterwarnings("ignore::bayesify.training.convergence.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:Several networks of one seed"),
]


def classifier(seed: int = 0, **options: Any) -> bf.BayesianModule:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    return bf.BayesianModule(net, seed=seed, **options).to(DEVICE)


def data(count: int = 240) -> tuple[Tensor, Tensor]:
    x = normals(count, 6, seed=1, dtype=torch.float32)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def loader(*, there: bool = False) -> TensorLoader:
    x, y = data()
    return TensorLoader(x.to(DEVICE), y.to(DEVICE), 32) if there else TensorLoader(x, y, 32)


def fitted(bnn: bf.BayesianModule, epochs: int = 3, **options: Any) -> bf.ELBO:
    elbo = bf.ELBO(bnn, num_data=240)
    bf.fit(elbo, loader(), epochs=epochs, lr=1e-2, progress=False, **options)
    return elbo


def state(elbo: bf.ELBO) -> Tensor:
    return torch.cat([each.detach().flatten().cpu().double() for each in elbo.parameters()])


# ---------------------------------------------------------------------------------------- training


def test_learns_from_minibatches_of_a_cpu() -> None:
    elbo = bf.ELBO(classifier(prior=bf.Gaussian(0.5)), num_data=240)
    history = bf.fit(elbo, loader(), loader(), epochs=30, lr=1e-2, progress=False)
    assert history[-1]["nll"] < 0.7 * history[0]["nll"]
    x, y = data()
    found = elbo.bnn.predict(x.to(DEVICE), num_samples=20)
    assert found.mean.device.type == DEVICE
    assert float((found.mean.argmax(-1).cpu() == y).double().mean()) > 0.75
    from_cpu = elbo.bnn.predict(x, num_samples=20)
    assert torch.equal(from_cpu.mean, found.mean)
    assert torch.equal(
        elbo.bnn.log_prob(x, y, 20), elbo.bnn.log_prob(x.to(DEVICE), y.to(DEVICE), 20)
    )
    from_loader = elbo.bnn.predict(TensorLoader(x, y, 32, shuffle=False), num_samples=20)
    assert torch.allclose(from_loader.mean.cpu(), found.mean.cpu(), atol=1e-6)


def test_minibatches_there_are_as_good_as_those_of_a_cpu() -> None:
    first, second = (bf.ELBO(classifier(), num_data=240) for _ in range(2))
    bf.fit(first, loader(), epochs=2, progress=False)
    bf.fit(second, loader(there=True), epochs=2, progress=False)
    assert torch.equal(state(first), state(second))


@pytest.mark.parametrize("backend", ["auto", "closed-form", "autograd"])
def test_resumes_with_the_same_weights(backend: Any, tmp_path: Path) -> None:
    whole = fitted(classifier(), 4, backend=backend)
    fitted(classifier(), 2, backend=backend, checkpoint_dir=tmp_path)
    resumed = fitted(classifier(), 4, backend=backend, checkpoint_dir=tmp_path, resume=True)
    assert torch.allclose(state(resumed), state(whole), rtol=0.0, atol=1e-6)


def test_a_run_of_a_gpu_goes_on_on_a_cpu(tmp_path: Path) -> None:
    whole = fitted(classifier(), 4)
    fitted(classifier(), 2, checkpoint_dir=tmp_path)
    there = classifier().to("cpu")
    net = there.net
    assert isinstance(net, nn.Sequential)
    resumed = bf.ELBO(there, num_data=240)
    bf.fit(
        resumed,
        loader(),
        epochs=4,
        lr=1e-2,
        progress=False,
        checkpoint_dir=tmp_path,
        resume=True,
    )
    # The noise of the weights is the same; the masks of dropout are not.
    assert (state(resumed) - state(whole)).norm() < 0.2 * state(whole).norm()


@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("prior", PRIORS)
def test_every_component(prior: str, posterior: str, likelihood: str) -> None:
    case = Case(prior, posterior, likelihood)
    bnn = case.bnn()
    x, y = case.data(12)
    noise = bnn.posterior.noise(NoiseKey(3, Stream.DIVERGENCE, 0), range(2))

    def kl() -> Tensor:
        there = noise.to(bnn.posterior.mean.device)
        prior, draw = bnn.weight_prior, bnn.posterior.draw(there)
        return bf.kl_divergence(bnn.posterior, prior, draw, prior_mean=bnn.prior_mean).detach()

    expected = None if case.is_point else kl()  # a point has none
    bnn.to(DEVICE)
    if expected is not None:
        assert torch.allclose(kl().cpu(), expected, rtol=1e-9)
    elbo = bf.ELBO(bnn, num_data=12, num_samples=2)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        terms = elbo(x.to(DEVICE), y.to(DEVICE))
        terms.loss.backward()
        optimizer.step()
        assert torch.isfinite(terms.loss)
    found = bnn.predict(x.to(DEVICE), num_samples=3)
    assert likelihood == "censored" or torch.isfinite(found.log_prob(y.to(DEVICE))).all()
    assert found.mean.device.type == DEVICE


def test_ivon_in_a_loop_of_ones_own_and_in_fit() -> None:
    elbo = bf.ELBO(classifier(prior=bf.Gaussian(0.5)), num_data=240)
    bf.fit(elbo, loader(), epochs=3, optimizer=lambda _: IVON(elbo, lr=0.05), progress=False)
    optimizer = IVON(elbo, lr=0.05)
    for x, y in loader(there=True):
        optimizer.zero_grad()
        elbo(x, y).loss.backward()
        optimizer.step()
    assert torch.isfinite(state(elbo)).all()


def test_many_networks_at_once() -> None:
    elbos = [bf.ELBO(classifier(seed), num_data=240) for seed in range(3)]
    histories = bf.fit_replicas(elbos, loader(), epochs=2, progress=False)
    assert all(torch.isfinite(torch.tensor(each[-1]["loss"])) for each in histories)
    together = bf.DeepEnsemble([elbo.bnn for elbo in elbos])
    assert together.predict(data()[0].to(DEVICE)).mean.device.type == DEVICE


def test_prunes_in_training_and_afterwards() -> None:
    elbo = fitted(classifier(), 4, pruning=bf.PruningSchedule(0.5, 1, 3))
    assert elbo.bnn.posterior.mask is not None
    assert float(elbo.bnn.posterior.mask.double().mean()) == pytest.approx(0.5, abs=0.01)
    small = bf.prune(elbo.bnn, 0.9)
    assert small.predict(data()[0].to(DEVICE)).mean.device.type == DEVICE


def test_streams_and_questions() -> None:
    bnn = classifier(prior=bf.Gaussian(0.5))
    fitted(bnn)
    elbo = bf.StreamingELBO(bnn, num_data=240)
    bf.fit(elbo, loader(), epochs=2, progress=False)
    pool = data()[0].to(DEVICE)
    for method in ("bald", "batch-bald", "entropy"):
        assert bf.acquire(bnn, pool, 5, method, num_samples=10).shape == (5,)
    assert len(bf.choose_coreset(pool, 5, "k-center")) == 5


def test_a_certificate() -> None:
    net = nn.Linear(6, 3)
    bnn = bf.BayesianModule(net, prior=bf.Gaussian(0.1), prior_mean="initial", init_std=0.1)
    bnn.to(DEVICE)
    elbo = bf.PACBayesObjective(bnn, num_data=240)
    bf.fit(elbo, loader(), epochs=2, progress=False)
    x, y = data()
    seen = torch.arange(0)
    found = bf.certify(bnn, x.to(DEVICE), y.to(DEVICE), prior_indices=seen, num_samples=200)
    assert 0.0 < found.error_bound <= 100.0
    assert bf.certify(bnn, x, y, prior_indices=seen, num_samples=200) == found  # data of a CPU


def test_a_certificate_of_convolutions() -> None:
    net = nn.Sequential(
        nn.Unflatten(-1, (1, 6)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )
    bnn = bf.BayesianModule(net, prior=bf.Gaussian(0.1), prior_mean="initial", init_std=0.1)
    x, y = data()
    found = bf.certify(bnn.to(DEVICE), x, y, prior_indices=torch.arange(0), num_samples=500)
    assert 0.0 < found.error_bound <= 100.0


def test_an_adapter() -> None:
    peft = pytest.importorskip("peft")
    from bayesify.adapters import bayesian_adapter, widen

    def adapted() -> Any:
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        config = peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"])
        return peft.get_peft_model(net, config).to(DEVICE)

    bnn = bayesian_adapter(adapted(), output=None)
    elbo = fitted(bnn, 20)
    x, y = data()
    assert float(elbo.bnn.log_prob(x, y.to(DEVICE), 5).mean()) > -1.2
    wide = widen(bnn.to_module(), loader(), num_samples=5, output=None)
    assert wide.posterior.std.device.type == DEVICE
    assert wide.predict(x, 5).mean.shape == (240, 3)


def test_a_closed_form_last_layer() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    bnn = bf.BayesianModule(
        net,
        likelihood=bf.GaussianLikelihood(0.5),
        include=bf.last_layer(net),
        posterior=bf.FullGaussian(),
        estimator=bf.ClosedFormLastLayer(),
    ).to(DEVICE)
    x = data()[0]
    elbo = bf.ELBO(bnn, num_data=240)
    bf.fit(elbo, TensorLoader(x, x[:, :1], 32), epochs=2, progress=False)
    assert bnn.predict(x.to(DEVICE)).mean.shape == (240, 1)


# ------------------------------------------------------------------------------------- afterwards


@pytest.mark.parametrize("estimator", [bf.WeightSampling(), bf.Flipout()], ids=str)
def test_predictions_are_those_of_a_cpu_to_their_noise(estimator: bf.Estimator) -> None:
    bnn = classifier(init_std=0.3, estimator=estimator).eval()
    x = data()[0]
    there = bnn.predict(x.to(DEVICE), num_samples=4000).mean.cpu()
    again = bnn.predict(x.to(DEVICE), num_samples=4000).mean.cpu()
    here = bnn.to("cpu").predict(x, num_samples=4000).mean
    assert torch.equal(there, again)
    # Each probability has a standard deviation of at most .5 over the samples.
    assert float((there - here).abs().max()) < 5 * 0.5 * (2 / 4000) ** 0.5


def test_the_memory_of_a_prediction_is_bounded() -> None:
    bnn = classifier().eval()
    x = data()[0].to(DEVICE)
    whole = bnn.predict(x, num_samples=50).mean
    cut = bnn.predict(x, num_samples=50, max_memory=2_100_000).mean
    assert torch.allclose(whole, cut, atol=1e-5)


def test_frozen_shrunk_and_ordinary_networks() -> None:
    bnn = bf.prune(fitted(classifier()).bnn, 0.5).eval()
    x = data()[0].to(DEVICE)
    frozen = bf.freeze(bnn, 8)
    assert all(each.device.type == DEVICE for each in frozen(x) if isinstance(each, Tensor))
    ordinary, small = bnn.to_module().eval(), bf.shrink(bnn, x[:2]).eval()
    assert torch.allclose(small(x), ordinary(x), atol=1e-5)


def test_compresses(tmp_path: Path) -> None:
    pytest.importorskip("constriction")
    bnn = bf.prune(fitted(classifier()).bnn, 0.5).eval()
    bf.compress(bnn, tmp_path / "net.bin", step_size=0.01)
    plain = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    net = bf.decompress(tmp_path / "net.bin", plain)
    x = data()[0]
    difference = net.eval()(x) - bnn.to_module().eval()(x.to(DEVICE)).cpu()
    assert float(difference.detach().abs().max()) < 0.1


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11, on a CPU too
@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_exports(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    from bayesify.export import export_onnx, export_program

    export = export_onnx if suffix == "onnx" else export_program
    example = data()[0][:4].to(DEVICE)
    report = export(bf.freeze(classifier().eval(), 4), tmp_path / f"net.{suffix}", example)
    assert report.largest_difference < 1e-5


def test_dropout_as_a_baseline() -> None:
    net = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3)).to(DEVICE)
    dropout = bf.MCDropout(net, bf.CategoricalLikelihood())
    found = dropout.predict(data()[0].to(DEVICE), num_samples=5)
    assert found.mean.device.type == DEVICE


# ----------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--precision", "bfloat16"],
        ["--estimator", "flipout"],
        ["--optimizer", "ivon", "--prior", "gaussian"],
        ["--objective", "f-quad", "--prior", "gaussian"],
    ],
    ids=str,
)
def test_trains_from_the_command_line(options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["--limit", "1000", "--epochs", "2", "--batch-size", "50", "--device", DEVICE]
    done = bayesify("train", "mnist", *words, "--out", out, *options)
    assert done.code == 0, done.err
    history = (out / "history.csv").read_text()
    assert "nan" not in history


def test_reproduces_there(tmp_path: Path) -> None:
    words = ["--quick", "--uncommitted", "--device", DEVICE, "--out", tmp_path]
    done = bayesify("reproduce", "blundell-pruning", *words)
    assert done.code == 0, done.err
    (path,) = tmp_path.glob("*.json")
    if DEVICE == "cuda":
        assert torch.cuda.get_device_name() in json.loads(path.read_text())["hardware"]


@pytest.mark.parametrize("case", ["mlp-400", "predict"])
def test_measures_there(case: str, tmp_path: Path) -> None:
    words = ["--steps", "2", "--batch", "16", "--uncommitted", "--store-disturbed"]
    out = tmp_path / "rows.json"
    done = bayesify("bench", "--case", case, *words, "--device", DEVICE, "--out", out)
    assert done.code == 0, done.err
    rows = json.loads(out.read_text())["metrics"]["rows"]
    assert {row["device"] for row in rows} == {DEVICE}
    paths = {row["path"] for row in rows}
    assert ("plain-net-graph" in paths) == (DEVICE == "cuda" and case == "mlp-400")
    assert all(row["ms_median"] > 0 and row["peak_mb"] > 0 for row in rows)
