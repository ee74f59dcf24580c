"""The report is self-contained and escaped, and no file of it is ever incomplete."""

import math
import re
import warnings
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread
from torch import nn

import bayesify as bf
from bayesify.app.report.figures import build_figures
from bayesify.app.report.page import write_report

EVERY_FIGURE = [
    "learning_curves",
    "reliability",
    "risk_coverage",
    "votes",
    "least_certain",
    "most_certain",
    "pruning",
    "snr",
    "weight_densities",
    "weight_posteriors",
]
HISTORY = [
    {"epoch": e, "loss": 2.0 / e, "nll": 1.0 / e, "kl": 90.0, "train_error": 9.0, "test_error": 8.0}
    for e in (1, 2, 3)
]
PRUNING = [
    {"fraction": 0.5, "weights_left": 1234, "error_mean_weights": 8.25, "error_predictive": 8.5},
    {"fraction": 0.98, "weights_left": 49, "error_mean_weights": 17.375, "file_bytes": 2048},
]
METRICS = {
    "test": {
        "error_mean_weights": 8.43,
        "error_predictive": 8.4,
        "nll": 0.2981,
        "brier": 0.1326,
        "ece": 0.0548,
    },
    "train": {"error_mean_weights": 6.96, "error_predictive": math.nan},
    "kl_nats": 100257.5,
    "num_weights": 79510,
    "epochs": 3,
    "seconds_train": 4000.0,
}
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Checks that tags match, and collects what the tests ask about."""

    def __init__(self, path: Path):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data + "\n"

    def ids(self):
        return [attrs["id"] for _, attrs in self.tags if "id" in attrs]


def network(posterior=bf.MeanFieldGaussian, outputs=4, likelihood=None, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, outputs))
    return bf.BayesianModule(net, posterior=posterior, likelihood=likelihood, **options)


def figures_of(bnn, num_examples=40, **changed):
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(num_examples, 36, generator=generator)
    targets = torch.randint(4, (num_examples,), generator=generator)
    arguments = {
        "images": images,
        "targets": targets,
        "predictive": bnn.predict(images, num_samples=5),
        "history": HISTORY,
        "pruning": PRUNING,
        "class_names": ["zero", "one", "two", "three"],
        "image_shape": (6, 6),
    }
    return build_figures(bnn, **arguments | changed)


def tiny_figure():
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([0, 1], [0, 1])
    return figure


def write(folder, **changed):
    arguments = {
        "title": "A run",
        "config": {"command": "bayesify train mnist", "prior": {"pi": 0.75}, "hidden": [400, 400]},
        "metrics": METRICS,
        "history": HISTORY,
        "pruning": PRUNING,
        "figures": {"learning_curves": tiny_figure(), "pruning": tiny_figure()},
        "notes": ["Tempered objective (temperature 0.1): not the ELBO."],
    }
    return write_report(folder, **arguments | changed)


@pytest.fixture(scope="module")
def figures():
    return figures_of(network())


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Write a report with every figure; one example keeps the galleries small."""
    folder = tmp_path_factory.mktemp("report") / "created" / "when missing"
    return write(folder, figures=figures_of(network(), num_examples=1))


def test_every_figure_is_embedded_and_written(figures, full):
    assert list(figures) == EVERY_FIGURE
    page = Page(full)
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) == len(EVERY_FIGURE)
    assert sorted(path.stem for path in full.parent.glob("*.png")) == sorted(EVERY_FIGURE)
    assert set(EVERY_FIGURE) < set(page.ids())
    text = full.read_text(encoding="utf-8")
    for path in full.parent.glob("*.png"):
        picture = imread(path)
        assert picture.shape[0] > 300
        assert picture.shape[1] > 300
        assert np.std(picture) > 0.03
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for attrs in images:
        assert attrs["alt"]
        assert int(attrs["width"]) > 200
    # Every figure has a caption.
    captions = re.findall("<figcaption>(.*?)</figcaption>", text)
    assert len(captions) == len(EVERY_FIGURE)
    assert all(len(caption) > 60 for caption in captions)


def test_it_refers_to_nothing_outside(full):
    page, text = Page(full), full.read_text(encoding="utf-8")
    for tag, attrs in page.tags:
        assert tag not in {"script", "link", "iframe", "object", "base"}
        assert attrs.get("href", "#").startswith("#")  # a figure is a link to itself
        assert attrs.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
        assert not any(name.startswith("on") for name in attrs)
    without_images = re.sub(r'src="data:[^"]*"', "", text)
    assert not re.search(r"https?:|url\(|@import|//", without_images)
    policies = [a["content"] for t, a in page.tags if a.get("http-equiv")]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_every_section_is_there(full):
    page = Page(full)
    for section in ("notes", "key-numbers", "measures", "command", "config"):
        assert section in page.ids()
    for shown in (
        "A run",
        "Tempered objective (temperature 0.1): not the ELBO.",
        "8.40 %",
        "8.43 %",
        "0.2981",
        "0.1326",
        "0.0548",
        "100,258",
        "79,510",
        "1 h 6 min",
        "averaged prediction",
        "mean weights",
        "nats per example",
        "6.96",
        "nan",
        "bayesify train mnist",
        "prior.pi",
        "0.75",
        "400, 400",
        "50 %",
        "1,234",
        "8.25",
        "8.50",
        "98 %",
        "49",
        "17.38",
        "2.0 kB",
    ):
        assert f"{shown}\n" in page.text, shown
    assert ("details", {}) in page.tags
    # The command is shown by itself and in the configuration.
    assert page.text.count("bayesify train mnist\n") == 2
    assert "command\n" in page.text


def test_what_only_a_bayesian_network_shows_comes_first(tmp_path, figures):
    shown = Page(write(tmp_path, figures=figures)).ids()
    assert [name for name in shown if name in figures][:3] == [
        "votes",
        "pruning",
        "learning_curves",
    ]
    for name in figures:
        assert f"figure-{name}" in shown


def test_missing_values_are_left_out(tmp_path):
    path = write(
        tmp_path, config={}, metrics={}, history=[], pruning=[], figures={}, notes=[], title="Bare"
    )
    page = Page(path)
    assert "Bare\n" in page.text
    assert page.ids() == ["config"]
    assert [tag for tag, _ in page.tags if tag == "img"] == []


def test_a_pruning_table_needs_no_figure(tmp_path):
    page = Page(write(tmp_path, figures={}))
    assert "pruning" in page.ids()
    assert "1,234\n" in page.text


def test_everything_from_outside_is_escaped(tmp_path):
    evil = "</style><script>alert('x')</script> & \"q\" {body} {0}"
    path = write(
        tmp_path,
        title=evil,
        notes=[evil],
        config={"command": ["bayesify", evil], evil: evil, "nested": {evil: [evil]}},
        metrics={"test": {evil: evil, "nll": 0.5}},
        figures={"own-figure": tiny_figure()},
    )
    page = Page(path)
    assert "script" not in [tag for tag, _ in page.tags]
    assert page.text.count(evil) >= 6
    assert "own figure\n" in page.text


def test_epochs_of_several_passes(tmp_path):
    page = Page(write(tmp_path, metrics={"epochs": 30, "passes": 1500}, history=[]))
    assert "30 epochs of 1,500 passes over the training data\n" in page.text


def test_only_settings_with_a_value_are_shown(tmp_path):
    config = {"kept": 0, "off": False, "nothing": None, "empty": [], "in": {"gone": None, "a": [1]}}
    page = Page(write(tmp_path, config=config))
    for shown in ("kept", "off", "in.a"):
        assert f"{shown}\n" in page.text, shown
    for absent in ("nothing", "empty", "gone", "None"):
        assert absent not in page.text, absent


def test_the_same_run_gives_the_same_bytes(tmp_path):
    pages = [write(tmp_path / name).read_bytes() for name in ("a", "b")]
    assert pages[0] == pages[1]


def test_other_runs_are_compared_on_the_test_data(tmp_path):
    page = Page(write(tmp_path, others={"SGD": {"test": {"nll": 0.25, "own": 1.5}, "train": {}}}))
    assert "comparison" in page.ids()
    for shown in ("SGD", "0.2500", "own", "1.5000"):
        assert f"{shown}\n" in page.text


def test_runs_without_held_out_data_are_compared_on_the_training_data(tmp_path):
    own, other = ({"test": None, "train": {"nll": nll}} for nll in (0.5, 0.25))
    page = Page(write(tmp_path, metrics=own, others={"SGD": other}))
    assert "Comparison on the training data\n" in page.text
    assert page.text.count("0.2500\n") == 1


def test_characters_that_the_font_lacks_are_one_note(tmp_path):
    figures = {"x": tiny_figure(), "y": tiny_figure()}
    for figure in figures.values():
        figure.axes[0].set_xlabel("\u4ef7\u683c, \u4ef7")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = Page(write(tmp_path, figures=figures))
    note = "figures show boxes for \u4ef7\u683c, which their font lacks"
    assert page.text.count(note) == 1


def test_other_warnings_of_a_figure_are_passed_on(tmp_path, monkeypatch):
    figure = tiny_figure()
    monkeypatch.setattr(figure, "savefig", lambda *_, **__: warnings.warn("odd", stacklevel=1))
    with pytest.warns(UserWarning, match="odd"):
        write(tmp_path, figures={"x": figure})


@pytest.mark.parametrize("name", ["../x", "a b", "", "x.png", "a\n"])
def test_names_that_are_no_file_names_raise(tmp_path, name):
    with pytest.raises(ValueError, match="must be of letters"):
        write(tmp_path, figures={name: tiny_figure()})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("victim", ["pruning.png", "report.html"])
def test_a_write_that_fails_midway_leaves_what_was_there(tmp_path, monkeypatch, victim):
    path = write(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    whole = Path.replace

    def full(self, target):
        if target.name == victim:
            raise OSError(28, "No space left on device")
        return whole(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, title="Another")
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert after.keys() == before.keys()  # no temporary file stays
    assert after[victim] == before[victim]
    assert "A run" in path.read_text(encoding="utf-8")


def test_a_figure_that_cannot_be_drawn_changes_no_file(tmp_path, monkeypatch):
    write(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    broken = tiny_figure()
    monkeypatch.setattr(broken, "savefig", None)
    with pytest.raises(TypeError):
        write(tmp_path, title="Another", figures={"learning_curves": tiny_figure(), "x": broken})
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_point_estimate_has_no_figure_that_needs_a_std(tmp_path):
    figures = figures_of(network(posterior=bf.Delta), num_examples=2, pruning=[])
    assert list(figures) == [
        "learning_curves",
        "reliability",
        "risk_coverage",
        "least_certain",
        "most_certain",
        "weight_densities",
    ]
    some = {name: figures[name] for name in ("learning_curves", "weight_densities")}
    path = write(tmp_path, figures=some, pruning=[], metrics={**METRICS, "kl_nats": 0.0})
    assert "KL from the prior" not in Page(path).text


def test_the_galleries_hold_the_extremes(figures):
    bnn = network()
    images = torch.rand(40, 36, generator=torch.Generator().manual_seed(1))
    total = bnn.predict(images, num_samples=5).total.sort().values
    for name, expected in (("most_certain", total[:8]), ("least_certain", total.flip(0)[:8])):
        shown = [
            float(re.search(r"total (\S+),", card.get_suptitle()).group(1))
            for card in figures[name].subfigs
        ]
        np.testing.assert_allclose(shown, expected, atol=0.0051)


def test_single_weights_are_named_by_their_place():
    bnn = network()
    with torch.no_grad():
        bnn.posterior.mean[36 * 12 + 12 + 2 * 12 + 5] = 100.0  # row 2, column 5 of the second layer
    figures = figures_of(bnn, image_shape=None)
    titles = [ax.get_title(loc="left") for ax in figures["weight_posteriors"].axes]
    assert titles[2] == "highest ratio, 74.0 dB\n2.weight[2, 5]"


def test_a_pruned_network_leaves_its_zeros_out():
    figures = figures_of(bf.prune(network(), 0.9), image_shape=None)
    assert figures["snr"].axes[0].get_title(loc="right").startswith("89.9 %")
    assert {"weight_densities", "weight_posteriors"} < set(figures)
    none = figures_of(bf.prune(network(), 1.0), image_shape=None)
    assert not {"snr", "weight_densities", "weight_posteriors"} & set(none)


def test_weights_of_baselines_are_drawn():
    figures = figures_of(
        network(),
        image_shape=None,
        baselines={"SGD": HISTORY},
        baseline_weights={"SGD": torch.linspace(-1, 1, 100)},
    )
    legend = figures["weight_densities"].axes[0].get_legend().get_texts()
    assert [text.get_text() for text in legend][-1] == "SGD"
    assert not {"votes", "least_certain", "most_certain"} & set(figures)  # inputs are no images


def test_images_have_one_or_three_channels():
    for shape in ((1, 6, 6), (3, 3, 4)):
        assert "most_certain" in figures_of(network(), num_examples=1, image_shape=shape)
    with pytest.raises(ValueError, match="1 or 3 channels, got"):
        figures_of(network(), num_examples=1, image_shape=(2, 3, 6))


def test_a_regression_has_no_class_figures(tmp_path):
    bnn = network(outputs=1, likelihood=bf.GaussianLikelihood(std=0.1))
    figures = figures_of(bnn, targets=torch.zeros(40, 1), image_shape=None, pruning=[])
    assert list(figures) == ["learning_curves", "snr", "weight_densities", "weight_posteriors"]
    assert figures["learning_curves"].axes[1].get_ylabel() == bnn.likelihood.error_name
    assert Page(write(tmp_path, figures=figures, metrics={"test": {"rmse": 0.5}})).text
