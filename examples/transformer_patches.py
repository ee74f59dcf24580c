"""A transformer encoder over the 16 patches of an MNIST digit, with random weights.

python examples/transformer_patches.py                 about four minutes on two cores

Attention is weight-sampled, the feed-forward layers have Flipout's signs for each image, and the
affine parameters of the layer norms stay deterministic (see the printed summary). Prints the test
error, nll and uncertainty for digits and for digits with their patches in another order.
"""

import argparse

import torch
from torch import Tensor, nn

import bayesify as bf
from bayesify.datasets import TensorLoader, load_images


class PatchEncoder(nn.Module):
    """Logits from patches, shape (N, 16, 49)."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Linear(49, width)
        self.place = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 96, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, patches: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(patches) + self.place).mean(1))


def to_patches(images: Tensor) -> Tensor:
    """Cut images of 784 pixels into 16 patches of 7 x 7, shape (N, 16, 49)."""
    return images.view(-1, 4, 7, 4, 7).transpose(2, 3).reshape(-1, 16, 49)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--limit", type=int, default=60_000, help="use only so many images")
    options = parser.parse_args()

    data = load_images("mnist", limit=options.limit)
    patches, test_patches = to_patches(data.train_inputs), to_patches(data.test_inputs)
    torch.manual_seed(0)
    bnn = bf.BayesianModule(PatchEncoder(), prior=bf.Gaussian(0.3), estimator=bf.Flipout())
    print(bnn.summary(patches[:2]))
    bf.fit(
        bf.ELBO(bnn, num_data=len(patches)),
        TensorLoader(patches, data.train_targets, batch_size=128),
        TensorLoader(test_patches, data.test_targets, 1000, shuffle=False),
        epochs=options.epochs,
        optimizer=lambda groups: torch.optim.Adam(groups, lr=2e-3),
        scheduler=bf.training.schedules.cosine,
        rho_lr_scale=10.0,
        kl_warmup_epochs=options.epochs / 2,
    )

    shuffled = test_patches[:, torch.randperm(16)]
    for name, x in (("digits as they are", test_patches), ("patches in another order", shuffled)):
        p = bnn.predict(x, num_samples=20)
        error = 100 * (p.mean.argmax(-1) != data.test_targets).float().mean()
        nll = -p.log_prob(data.test_targets).mean()
        print(
            f"{name}: error {error:.2f} %, nll {nll:.3f} nats, uncertainty {p.total.mean():.3f} "
            f"nats, of it {p.epistemic.mean():.3f} from the weights"
        )


if __name__ == "__main__":
    main()
