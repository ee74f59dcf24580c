"""Estimators with other likelihoods: counts, heavy tails, censored numbers, ordered classes."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.base import clone
from sklearn.metrics import log_loss
from sklearn.utils.estimator_checks import parametrize_with_checks

from bayesify.prediction import (
    CountPredictive,
    GaussianPredictive,
    NegativeBinomialPredictive,
    OrdinalPredictive,
    PoissonPredictive,
    StudentTPredictive,
)
from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from bayesify.tabular.censoring import Limits, RecordedPredictive
from bayesify.tabular.likelihoods import CountStatistics
from bayesify.tabular.outside import widened
from bayesify.tabular.weights import Array

pytestmark = [
    pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::bayesify.tabular.TableWarning"),
]

QUICK: dict[str, Any] = {"hidden_layer_sizes": (8,), "steps": 60, "num_samples": 20}
SETTINGS: dict[str, dict[str, Any]] = {
    "student-t": {},
    "poisson": {},
    "negative-binomial": {},
    "censored": {"censored_below": 1.0, "censored_above": 9.0},
}
COUNTS = ("poisson", "negative-binomial")
ORDER = ["low", "middle", "high", "top"]


def rows(count: int = 120, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 2))
    return x, rng.poisson(np.exp(1.0 + 0.6 * x[:, 0])).astype(float)


def grades(count: int = 120, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 2))
    place = np.digitize(2.0 * x[:, 0] + rng.logistic(size=count), [-2.0, 0.0, 2.0])
    return x, np.array(ORDER)[place]


@pytest.fixture(scope="module", params=SETTINGS)
def model(request: pytest.FixtureRequest) -> BayesianMLPRegressor:
    x, y = rows()
    settings = {"likelihood": request.param, **SETTINGS[request.param]}
    return BayesianMLPRegressor(random_state=0, **settings, **QUICK).fit(x, y)


@pytest.fixture(scope="module")
def ordered() -> BayesianMLPClassifier:
    x, y = grades()
    return BayesianMLPClassifier(ordered=ORDER, random_state=0, **QUICK).fit(x, y)


# ---------------------------------------------------------------------------------------- numbers


def test_mean_std_and_interval_are_those_of_the_predictive(model: BayesianMLPRegressor) -> None:
    x, _ = rows(30, seed=1)
    kinds = {
        "student-t": StudentTPredictive,
        "poisson": PoissonPredictive,
        "negative-binomial": NegativeBinomialPredictive,
        "censored": GaussianPredictive,
    }
    p = model.predictive(x)
    assert isinstance(p, kinds[model.likelihood])
    mean, std = model.predict(x, return_std=True)
    low, high = model.predict_interval(x, level=0.9)
    np.testing.assert_allclose(mean, p.mean)
    np.testing.assert_allclose(std, p.total.sqrt())
    for end, q in ((low, 0.05), (high, 0.95)):
        np.testing.assert_allclose(end, p.quantile(q), rtol=1e-6)
        assert end.shape == mean.shape == std.shape == (30,)
    assert ((low < mean) & (mean < high)).all()
    if model.likelihood in COUNTS:
        assert (low >= 0.0).all()
        assert (low % 1.0 == 0.0).all()
    assert -1.0 < model.score(*rows(60, seed=2)) < 1.0


def test_counts_are_not_standardised_and_start_at_their_mean() -> None:
    x, y = rows()
    for scale in (1.0, 1e6):
        settings = {**QUICK, "steps": 1}
        model = BayesianMLPRegressor(likelihood="poisson", random_state=0, **settings)
        model.fit(x, scale * y)
        assert model.target_scaling_.shift == 0.0
        assert model.target_scaling_.scale == 1.0
        # Far less than the 13.8 between the logarithms of the two means.
        assert abs(np.log(np.median(model.predict(x)) / (scale * y.mean()))) < 1.0


def test_a_model_is_stored_pickled_and_cloned(model: BayesianMLPRegressor, tmp_path: Path) -> None:
    x, _ = rows(10, seed=1)
    x = np.vstack([x, 30.0 * x])  # the latter are outside
    model.save(tmp_path / "model.safetensors")
    loaded = BayesianMLPRegressor.load(tmp_path / "model.safetensors")
    for other in (loaded, pickle.loads(pickle.dumps(model))):
        for one, two in zip(
            model.predict(x, return_std=True), other.predict(x, return_std=True), strict=True
        ):
            np.testing.assert_array_equal(one, two)
    assert clone(model).get_params() == model.get_params() == loaded.get_params()


def test_conformal_intervals(model: BayesianMLPRegressor) -> None:
    model = pickle.loads(pickle.dumps(model)).calibrate(*rows(60, seed=2))
    x, y = rows(400, seed=3)
    if model.likelihood == "censored":
        y = y.clip(1.0, 9.0)
    low, high = model.predict_interval(x, level=0.8, method="conformal")
    # The coverage given 60 rows of calibration has a standard deviation of 0.05.
    assert ((low <= y) & (y <= high)).mean() > 0.6
    if model.likelihood in COUNTS:
        assert (low >= 0.0).all()
        assert (low <= high).all()
        assert (low % 1.0 == high % 1.0).all()
        assert (low % 1.0 == 0.0).all()


def test_several_targets(model: BayesianMLPRegressor) -> None:
    x, y = rows()
    both = np.column_stack([y, y[::-1]])
    weights = np.random.default_rng(0).integers(1, 3, len(y))
    fitted = clone(model).fit(x, both, weights).partial_fit(x[:20], both[:20])
    mean, std = fitted.predict(x[:7], return_std=True)
    low, _ = fitted.predict_interval(x[:7])
    assert mean.shape == std.shape == low.shape == (7, 2)
    if model.likelihood != "censored":  # which alone has two numbers a target
        return
    held_out = clone(fitted).set_params(early_stopping=True, validation_fraction=0.2)
    assert held_out.fit(x, both).predict(x[:7]).shape == (7, 2)


def test_rows_outside_are_less_certain(model: BayesianMLPRegressor) -> None:
    x, _ = rows(5, seed=1)
    far = np.where(np.arange(2) == 1, 50.0, x)
    plain = model.bnn_.predict(model._encoded(far), num_samples=20)
    p = model._predictive(model._rows(far))
    within = model._predictive(model._rows(far)._replace(distances=torch.zeros(5)))
    assert (p.epistemic > within.epistemic).all()
    torch.testing.assert_close(p.mean, within.mean, rtol=1e-6, atol=1e-9)
    assert type(p) is type(plain)


@pytest.mark.parametrize("samples", [1, 200])
def test_the_spread_of_counts_outside(samples: int) -> None:
    rates = torch.full((samples, 2), 3.0, dtype=torch.float64).log()
    spread = CountStatistics.of(torch.tensor([[0.0], [6.0]])).spread  # mean 3, variance 9
    p = widened(PoissonPredictive(rates), torch.tensor([0.0, math.inf]), spread)
    torch.testing.assert_close(p.mean, torch.tensor([3.0, 3.0], dtype=torch.float64))
    assert float(p.epistemic[0]) == pytest.approx(0.0, abs=1e-12)
    # Of a log-normal variable's quantiles a little of the upper tail is lacking.
    assert 6.0 < float(p.epistemic[1]) < 9.0


@pytest.mark.parametrize(
    ("settings", "target", "message"),
    [
        ({"likelihood": "poisson"}, [0.5], "counts, integers from 0"),
        ({"likelihood": "negative-binomial"}, [-1.0], "got -1"),
        ({"likelihood": "poisson"}, [1e300], "integers from 0 to 1e"),
        ({"likelihood": "Poisson"}, [1.0], "'negative-binomial'"),
        ({"likelihood": None}, [1.0], "likelihood must be"),
        ({"likelihood": "poisson", "noise": "learned"}, [1.0], "would do nothing"),
        ({"noise": "loud"}, [1.0], "noise must be"),
        ({"likelihood": "censored"}, [1.0], "needs censored_below"),
        ({"likelihood": "gaussian", "censored_above": 3.0}, [1.0], "would do nothing"),
        ({"likelihood": "censored", "censored_above": math.nan}, [1.0], "finite"),
        ({"likelihood": "censored", "censored_above": "high"}, [1.0], "finite"),
        (
            {"likelihood": "censored", "censored_above": 1.0, "censored_below": 2.0},
            [1.0],
            "below the upper",
        ),
        ({"likelihood": "censored", "censored_above": -5.0}, [1.0], "between the limits"),
    ],
)
def test_wrong_settings_and_targets(
    settings: dict[str, Any], target: list[float], message: str
) -> None:
    x, y = rows()
    with pytest.raises(ValueError, match=message):
        BayesianMLPRegressor(**settings, **QUICK).fit(x, np.append(y[1:], target))


def test_later_targets_are_checked_too(model: BayesianMLPRegressor) -> None:
    if model.likelihood not in COUNTS:
        return
    x, y = rows()
    for call in (model.partial_fit, model.calibrate):
        with pytest.raises(ValueError, match="counts"):
            call(x, y + 0.5)


# --------------------------------------------------------------------------------------- censored


def test_the_recorded_number_of_a_gaussian() -> None:
    means = torch.tensor([[0.0, 5.0, -4.0]], dtype=torch.float64)
    std = torch.tensor(2.0, dtype=torch.float64)
    y = GaussianPredictive(means, std)
    p = RecordedPredictive.of(y, Limits(-1.0, 3.0))
    draws = y.simulate(400_000).clamp(-1.0, 3.0)
    # 5 standard errors of 400,000 draws with a standard deviation below 2.
    torch.testing.assert_close(p.mean, draws.mean(0), rtol=0.0, atol=0.016)
    torch.testing.assert_close(p.total, draws.var(0), rtol=0.0, atol=0.03)
    at = torch.tensor([-1.0, 3.0, 0.5], dtype=torch.float64)
    expected = [norm.logcdf(-0.5), norm.logcdf(1.0), norm.logpdf(0.5, -4.0, 2.0)]
    np.testing.assert_allclose(p.log_prob(at), expected, rtol=1e-12)
    np.testing.assert_allclose(p.cdf(at), [norm.cdf(-0.5), 1.0, norm.cdf(2.25)], rtol=1e-12)
    assert p.quantile(0.999).tolist() == [3.0, 3.0, pytest.approx(2.1805, abs=1e-3)]
    assert float(p.simulate(1000).max()) == 3.0


def test_the_score_of_a_censored_target_is_that_of_the_recorded_number(
    model: BayesianMLPRegressor,
) -> None:
    if model.likelihood != "censored":
        return
    x, y = rows(60, seed=2)
    assert model.score(x, y) == pytest.approx(model.score(x, y.clip(1.0, 9.0)))
    assert model.predict(x * 3.0).max() > 9.0 or model.predict(x * 3.0).min() < 1.0


# ------------------------------------------------------------------------------------ ordered


def test_probabilities_have_sorted_columns_and_the_predictive_the_order(
    ordered: BayesianMLPClassifier,
) -> None:
    x, y = grades(80, seed=1)
    assert ordered.classes_.tolist() == sorted(ORDER)
    assert ordered.class_order_.tolist() == ORDER
    p = ordered.predictive(x)
    assert isinstance(p, OrdinalPredictive)
    probabilities = ordered.predict_proba(x)
    for place, label in enumerate(ORDER):
        column = probabilities[:, ordered.classes_.tolist().index(label)]
        np.testing.assert_allclose(column, p.mean[:, place], rtol=1e-6)
    # Frequencies have a log loss of 1.36; a wrong order of the columns one above.
    assert log_loss(y, probabilities, labels=ordered.classes_) < 1.2
    assert ordered.score(x, y) > 0.4
    names = np.array(ORDER)
    assert set(ordered.predict(x)) <= set(names)
    assert ordered.predict_set(x, 0.9).shape == (80, 4)
    # Higher classes become more probable along the first column.
    ends = ordered.predict([[-2.0, 0.0], [2.0, 0.0]])
    assert ends.tolist() == ["low", "top"]


def test_the_order_of_a_list_is_that_of_sorted_numbers(ordered: BayesianMLPClassifier) -> None:
    x, y = grades()
    numbers = np.array([ORDER.index(label) for label in y])
    other = BayesianMLPClassifier(ordered=True, random_state=0, **QUICK).fit(x, numbers)
    by_name = ordered.predict_proba(x)[:, np.argsort(np.argsort(ORDER))]
    np.testing.assert_allclose(other.predict_proba(x), by_name, rtol=1e-9)


def test_ordered_classes_are_stored_weighted_and_calibrated(
    ordered: BayesianMLPClassifier, tmp_path: Path
) -> None:
    x, y = grades()
    far = np.vstack([x[:5], 30.0 * x[:5]])
    ordered.save(tmp_path / "model.safetensors")
    loaded = BayesianMLPClassifier.load(tmp_path / "model.safetensors")
    for other in (loaded, pickle.loads(pickle.dumps(ordered))):
        np.testing.assert_array_equal(ordered.predict_proba(far), other.predict_proba(far))
    weighted = clone(ordered).set_params(class_weight="balanced").fit(x, y)
    sets = weighted.calibrate(*grades(60, seed=2)).predict_set(x, 0.8, method="conformal")
    assert sets.shape == (120, 4)
    # Far outside, the training's frequencies have a share of one half, in the order of the classes.
    p = ordered.predictive(np.full((1, 2), 1e9))
    shares = [(y == label).mean() for label in ORDER]
    assert (p.mean[0].numpy() > 0.49 * np.array(shares)).all()


def test_a_class_without_rows_and_further_rows() -> None:
    x, y = grades()
    few = BayesianMLPClassifier(
        ordered=[*ORDER, "peak"], class_weight="balanced", random_state=0, **QUICK
    ).fit(x, y)
    assert few.predict_proba(x).shape == (120, 5)
    further = BayesianMLPClassifier(ordered=ORDER, random_state=0, **QUICK)
    further.partial_fit(x[:60], y[:60], classes=ORDER).partial_fit(x[60:], y[60:])
    assert further.class_order_.tolist() == ORDER


@pytest.mark.parametrize(
    ("ordered", "message"),
    [
        ("low", "ordered must be True"),
        (3, "ordered must be True"),
        (ORDER[1:], "without \\['low'\\]"),
        ([*ORDER, "low"], "each class of y once"),
        ([ORDER], "ordered must be True"),
    ],
)
def test_wrong_orders(ordered: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BayesianMLPClassifier(ordered=ordered, **QUICK).fit(*grades())


def test_one_class_has_no_order() -> None:
    with pytest.raises(ValueError, match="at least 2 classes"):
        BayesianMLPClassifier(ordered=True, **QUICK).fit(grades()[0], np.zeros(120))


# --------------------------------------------------------------------------- scikit-learn's checks


class Rounding(BayesianMLPRegressor):
    """Counts of scikit-learn's checks, whose targets are any numbers."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:  # noqa: N803
        return super().fit(X, _rounded(y), sample_weight)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:  # noqa: N803
        return super().partial_fit(X, _rounded(y), sample_weight)


def _rounded(y: Any) -> Any:
    if y is None or np.asarray(y).dtype.kind not in "fiu":
        return y
    return np.round(np.abs(np.asarray(y, dtype=np.float64)))


FEW: dict[str, Any] = {"steps": 15, "num_samples": 20}
CHECKED = [
    Rounding(**FEW, likelihood="poisson"),
    BayesianMLPRegressor(**FEW, likelihood="student-t"),
    BayesianMLPRegressor(**FEW, likelihood="censored", censored_above=1e9),
    BayesianMLPClassifier(**FEW, ordered=True),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(CHECKED, expected_failed_checks=lambda _: {})
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


# ------------------------------------------------------------------------------------- evidence


def mean_nll(model: BayesianMLPRegressor, x: Array, y: Array) -> float:
    return -float(model.predictive(x).log_prob(torch.from_numpy(y)).mean())


@pytest.mark.slow
def test_poisson_predicts_counts_better_than_a_gaussian() -> None:
    x, y = rows(200)
    new, truth = rows(2000, seed=1)
    gaussian = BayesianMLPRegressor(random_state=0, steps=500).fit(x, y)
    poisson = BayesianMLPRegressor(likelihood="poisson", random_state=0, steps=500).fit(x, y)
    # The nll of a count under a Gaussian is that of the cell of width 1 around it.
    p, targets = gaussian.predictive(new), torch.from_numpy(truth)
    low = torch.where(targets > 0.0, targets - 0.5, -1e6)  # a count is at least 0
    cell = -float((p.cdf(targets + 0.5) - p.cdf(low)).clamp_min(1e-12).log().mean())
    best = -float(
        PoissonPredictive(torch.from_numpy(1.0 + 0.6 * new[:, 0])[None]).log_prob(targets).mean()
    )
    ours = mean_nll(poisson, new, truth)
    print(f"nll in nats: truth {best:.4f}, poisson {ours:.4f}, gaussian {cell:.4f}")
    assert isinstance(poisson.predictive(new), CountPredictive)
    assert ours < best + 0.03
    assert ours < cell - 0.01


@pytest.mark.slow
def test_an_order_helps_where_rows_are_few() -> None:
    new, truth = grades(2000, seed=99)
    differences = []
    for seed in range(4):
        x, y = grades(40, seed=seed)
        found = []
        for order in (ORDER, False):
            model = BayesianMLPClassifier(
                ordered=order, steps=600, num_samples=50, random_state=0
            ).fit(x, y)
            found.append(log_loss(truth, model.predict_proba(new), labels=model.classes_))
        differences.append(found[1] - found[0])
    print("nll of classes without order minus ordered:", np.round(differences, 4))
    assert np.mean(differences) > 0.03


@pytest.mark.slow
def test_censored_numbers_leave_no_bias() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2))
    y = 2.0 * x[:, 0] + rng.normal(size=300)
    recorded = np.minimum(y, 1.0)
    new = rng.normal(size=(1000, 2))
    truth = 2.0 * new[:, 0]
    high = truth > 1.0
    censored = BayesianMLPRegressor(
        likelihood="censored", censored_above=1.0, random_state=0, steps=500
    ).fit(x, recorded)
    gaussian = BayesianMLPRegressor(random_state=0, steps=500).fit(x, recorded)
    bias = [float((m.predict(new) - truth)[high].mean()) for m in (censored, gaussian)]
    print(f"bias where the mean is above the limit: censored {bias[0]:.3f}, gaussian {bias[1]:.3f}")
    assert abs(bias[0]) < 0.4
    assert bias[1] < -1.0
