"""A small convolutional network on MNIST, made Bayesian without being edited.

python examples/conv_mnist.py --estimator flipout      about three minutes on two cores

Prints the treatment of each parameter, the test error and nll of the averaged predictions and of
the mean weights, and the share of the errors among the tenth of the images that are least certain.
"""

import argparse

import torch
from torch import nn

import bayesify as bf
from bayesify.datasets import TensorLoader, load_images

ESTIMATORS = {
    "sampling": bf.WeightSampling(),
    "local": bf.LocalReparameterization(),
    "flipout": bf.Flipout(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--estimator", choices=ESTIMATORS, default="flipout")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--limit", type=int, default=60_000, help="use only so many images")
    options = parser.parse_args()

    data = load_images("mnist", limit=options.limit)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Unflatten(-1, (1, 28, 28)),
        nn.Conv2d(1, 8, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    bnn = bf.BayesianModule(net, prior=bf.Gaussian(0.3), estimator=ESTIMATORS[options.estimator])
    print(bnn.summary(data.train_inputs[:2]))

    elbo = bf.ELBO(bnn, num_data=len(data.train_inputs))
    loader = TensorLoader(data.train_inputs, data.train_targets, batch_size=128)
    bf.fit(
        elbo,
        loader,
        TensorLoader(data.test_inputs, data.test_targets, 1000, shuffle=False),
        epochs=options.epochs,
        rho_lr_scale=10.0,
        kl_warmup_epochs=options.epochs / 2,
    )

    for name, p in (
        ("averaged over 30 weight samples", bnn.predict(data.test_inputs, num_samples=30)),
        ("mean weights", bnn.predict_mean(data.test_inputs)),
    ):
        wrong = p.mean.argmax(-1) != data.test_targets
        nll = -p.log_prob(data.test_targets).mean()
        unsure = p.total.argsort(descending=True)[:1000]
        print(
            f"{name}: error {100 * wrong.float().mean():.2f} %, nll {nll:.4f} nats; "
            f"{100 * wrong[unsure].sum() / wrong.sum():.0f} % of the errors are among the tenth "
            "of least certain images"
        )


if __name__ == "__main__":
    main()
