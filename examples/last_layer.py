"""A pretrained network with a Bayesian last layer.

python examples/last_layer.py                          about one minute on two cores

The other layers keep their trained weights. The last layer's prior is centred on its trained
weights (MOPED, Krishnan et al. 2020), and its posterior starts there with std 0.1 |w|. Prints the
nll, and the part of the uncertainty that comes from the weights, for digits and for rotated digits,
which the network has never seen. For a plain network that part is 0.
"""

import argparse

import torch
from torch import nn

import bayesify as bf
from bayesify.datasets import TensorLoader, load_images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--limit", type=int, default=60_000, help="use only so many images")
    options = parser.parse_args()
    data = load_images("mnist", limit=options.limit)
    loader = TensorLoader(data.train_inputs, data.train_targets, batch_size=128)

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10)
    )
    optimizer = torch.optim.Adam(net.parameters())
    for epoch in range(options.epochs):  # in place of a network that you already have
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), targets).backward()
            optimizer.step()

    net.requires_grad_(False)[-1].requires_grad_(True)
    bnn = bf.BayesianModule(
        net,
        include=bf.last_layer(net),
        prior=bf.Gaussian(0.1),
        prior_mean="initial",
        init_std=bf.RelativeStd(0.1),
        estimator=bf.LocalReparameterization(),
    )
    bf.fit(
        bf.ELBO(bnn, num_data=len(data.train_inputs)),
        loader,
        epochs=options.epochs,
        rho_lr_scale=5.0,
    )

    images = data.test_inputs.unflatten(-1, data.image_shape)
    rotated = images.rot90(1, (-2, -1)).flatten(1)
    plain = bf.BayesianModule(net, posterior=bf.Delta)
    for name, model in (("plain", plain), ("last layer Bayesian", bnn)):
        p, far = (model.predict(x, num_samples=50) for x in (data.test_inputs, rotated))
        print(
            f"{name}: nll {-p.log_prob(data.test_targets).mean():.4f} nats; uncertainty "
            f"{p.total.mean():.3f} nats, of it {p.epistemic.mean():.4f} from the weights; of "
            f"rotated digits {far.total.mean():.3f}, of it {far.epistemic.mean():.4f}"
        )


if __name__ == "__main__":
    main()
