"""A network within skorch, and scikit-learn's search over the width of its prior.

pip install skorch
python examples/skorch_search.py                       about half a minute on two cores

skorch trains what its module returns: here the objective, so that a step is one of the ELBO. Prints
the nll of each width on held-out folds, and the test error of the best.
"""

import argparse
from typing import Any

import torch
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier
from torch import nn

import bayesify as bf
from bayesify.datasets import load_images


class Objective(bf.ELBO):
    """The ELBO of a small network, from arguments that a search can set."""

    def __init__(self, prior_std: float = 0.3, num_data: int = 1) -> None:
        net = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
        super().__init__(bf.BayesianModule(net, prior=bf.Gaussian(prior_std)), num_data=num_data)


class BayesianClassifier(NeuralNetClassifier):
    """Steps on the ELBO, and probabilities averaged over weight samples."""

    def train_step_single(self, batch: Any, **_: Any) -> dict[str, torch.Tensor]:
        self._set_training(training=True)
        terms = self.module_(*batch)
        terms.loss.backward()
        return {"loss": terms.loss.detach(), "y_pred": terms.outputs[0]}

    def validation_step(self, batch: Any, **_: Any) -> dict[str, torch.Tensor]:
        p = self.evaluation_step(batch)
        return {"loss": self.get_loss(p, batch[1]), "y_pred": p}

    def evaluation_step(self, batch: Any, training: bool = False) -> torch.Tensor:
        self._set_training(training)
        # skorch's classifier expects probabilities, of which it takes the logarithm.
        return self.module_.bnn.predict(batch[0], num_samples=20).mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--limit", type=int, default=2000, help="use only so many images")
    options = parser.parse_args()
    data = load_images("mnist", limit=options.limit)
    torch.manual_seed(0)
    model = BayesianClassifier(
        Objective,
        module__num_data=options.limit * 2 // 3,  # N of a fold's training part
        optimizer=torch.optim.Adam,
        lr=2e-3,
        max_epochs=options.epochs,
        train_split=None,
        verbose=0,
    )
    widths = {"module__prior_std": [0.03, 0.1, 0.3]}
    search = GridSearchCV(model, widths, scoring="neg_log_loss", cv=3, refit=False)
    inputs, targets = data.train_inputs.numpy(), data.train_targets.numpy()
    scores = search.fit(inputs, targets).cv_results_["mean_test_score"]
    for std, score in zip(widths["module__prior_std"], scores, strict=True):
        print(f"prior std {std:.2f}: nll {-score:.4f} nats on held-out folds")
    best = model.set_params(**search.best_params_, module__num_data=options.limit)
    best.fit(inputs, targets)
    wrong = best.predict(data.test_inputs.numpy()) != data.test_targets.numpy()
    print(f"best, on all training images: test error {100 * wrong.mean():.2f} %")


if __name__ == "__main__":
    main()
