"""An LSTM that reads MNIST digits row by row, with its uncertainty after each few rows.

python examples/lstm_rows.py                           about two minutes on two cores

The LSTM uses its weights at every time step: they are weight-sampled, with one sample for the whole
sequence. The last layer has different noise for each image (see the printed summary). The printed
table shows that uncertainty falls and accuracy rises as more of the digit is read.
"""

import argparse

import torch
from torch import Tensor, nn

import bayesify as bf
from bayesify.datasets import TensorLoader, load_images


class RowReader(nn.Module):
    """Logits from the rows of an image read so far, shape (N, rows, 28)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(28, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.lstm(rows)[0][:, -1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--limit", type=int, default=60_000, help="use only so many images")
    options = parser.parse_args()

    data = load_images("mnist", limit=options.limit)
    rows, test_rows = (x.unflatten(-1, (28, 28)) for x in (data.train_inputs, data.test_inputs))
    # Some images are cut off at a random row, so that the network learns to predict early.
    torch.manual_seed(0)
    cut = torch.randint(4, 40, (len(rows), 1, 1))
    inputs = torch.where(torch.arange(28).view(1, -1, 1) < cut, rows, 0.0)

    bnn = bf.BayesianModule(
        RowReader(), prior=bf.Gaussian(0.3), estimator=bf.LocalReparameterization()
    )
    print(bnn.summary(rows[:2]))
    bf.fit(
        bf.ELBO(bnn, num_data=len(inputs)),
        TensorLoader(inputs, data.train_targets, batch_size=128),
        epochs=options.epochs,
        optimizer=lambda groups: torch.optim.Adam(groups, lr=3e-3),
        scheduler=bf.training.schedules.cosine,
        rho_lr_scale=10.0,
        kl_warmup_epochs=options.epochs / 2,
    )

    print("rows read   error, %   uncertainty, nats: total   of it from the weights")
    for read in (7, 14, 21, 28):
        seen = torch.where(torch.arange(28).view(1, -1, 1) < read, test_rows, 0.0)
        p = bnn.predict(seen, num_samples=20)
        error = 100 * (p.mean.argmax(-1) != data.test_targets).float().mean()
        print(f"{read:9d} {error:10.1f} {p.total.mean():26.3f} {p.epistemic.mean():24.3f}")


if __name__ == "__main__":
    main()
