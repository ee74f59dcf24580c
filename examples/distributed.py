"""Several processes, each with its part of every minibatch and weights of its own.

torchrun --nproc-per-node 2 examples/distributed.py       about one minute on two cores

``DistributedDataParallel`` wraps the objective, not the network, so that the KL is counted once and
the gradients of mean and rho are averaged. All processes have one seed; the rank makes their weight
samples differ. Prints the test error and nll, and whether all processes hold the same posterior.
"""

import argparse
import os

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bayesify as bf
from bayesify.datasets import load_images
from bayesify.metrics import error_percent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--limit", type=int, default=60_000, help="use only so many images")
    options = parser.parse_args()
    if "RANK" not in os.environ:  # alone, without torchrun
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
        os.environ["MASTER_PORT"] = "0"
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))

    data = load_images("mnist", limit=options.limit)
    train = TensorDataset(data.train_inputs, data.train_targets)
    sampler: DistributedSampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=256 // world, sampler=sampler)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
    elbo = bf.ELBO(bf.BayesianModule(net, seed=0), num_data=len(train))  # N of all processes
    model = DistributedDataParallel(elbo)
    optimizer = torch.optim.Adam(bf.parameter_groups(elbo))
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            kl_scale = min(1.0, (epoch + 1) / max(1, options.epochs // 2))
            model(inputs, targets, kl_scale=kl_scale).loss.backward()
            optimizer.step()

    posterior = elbo.bnn.posterior
    mean = posterior.mean.detach().clone()
    distributed.broadcast(mean, src=0)
    equal = torch.tensor(float(torch.equal(mean, posterior.mean)))
    distributed.all_reduce(equal, distributed.ReduceOp.MIN)
    if rank == 0:
        p = elbo.bnn.eval().predict(data.test_inputs, num_samples=30)
        error = error_percent(p.mean, data.test_targets)
        nll = -p.log_prob(data.test_targets).mean()
        processes = f"{world} process{'es' if world > 1 else ''}"
        print(f"{processes}: test error {error:.2f} %, nll {float(nll):.4f} nats")
        print(f"equal posteriors: {bool(equal)}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
