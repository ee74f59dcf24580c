"""Error of LeNet-300-100, LeNet-5-Caffe and 2x1200 on MNIST by weights left, units and bytes.

Each job prunes a network in training, compresses it to a file and measures the decoded network. The
settings were chosen on held-out training images; the test images are used once, after the last
epoch.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesify.io.compression import compressed, decompressed
from bayesify.metrics import error_percent, nll
from bayesify.module.shrinking import shrink
from bayesify.reproduce.harness.experiment import Context, Experiment, Job, Result
from bayesify.reproduce.harness.image_runs import mnist_of
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error
from bayesify.reproduce.papers.compression.literature import REPORTED
from bayesify.reproduce.papers.compression.networks import (
    NETWORKS,
    make_network,
    num_nonzero,
    units_left,
)
from bayesify.reproduce.papers.compression.recipes import QUICK, RECIPES, SECONDS
from bayesify.reproduce.papers.compression.training import train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "compression_job", "decoded", "run", "summary"]

_ROWS = 1000


def compression_job(
    name: str, seed: int, recipe: Mapping[str, Any], *, quick: bool, **more: Any
) -> Job:
    """Return a job of a recipe.

    Args:
        name: name of the job.
        seed: seed of all randomness.
        recipe: as in ``RECIPES``.
        quick: whether to train for few epochs on few images instead.
        more: further settings of the job. ``held_out``: number of training images that take the
            place of the test images.
    """
    config = {**recipe, **more}
    epochs = sum(config[phase]["epochs"] for phase in ("bound", "tuning"))
    seconds = 5.0 + SECONDS[config["network"]] * epochs
    if quick:
        phases = {"bound": {**config["bound"], "epochs": 2}}
        phases["tuning"] = {**config["tuning"], "epochs": 1}
        config, seconds = {**config, **QUICK, **phases}, 5.0
    return Job(name, seed, config, seconds, ("mnist",))


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return a job for each recipe and seed; a quick run has the small networks only."""
    return [
        compression_job(name, seed, recipe, quick=quick)
        for seed in seeds
        for name, recipe in RECIPES.items()
        if not (quick and recipe["network"] == "2x1200")
    ]


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train and prune a network, compress it, and measure the network decoded from the file."""
    data = mnist_of(job, context)
    bnn = train(job, data, context)
    content, size = compressed(bnn, step_size=job.config["step_size"])
    net = decoded({"config": job.config, "metrics": {"file": _text(content)}})
    outputs = _outputs(net, data.test_inputs)
    trained = _outputs(bnn.to_module(), data.test_inputs)
    small = shrink(net, data.test_inputs[:2])
    return {
        "error": error_percent(outputs.softmax(-1), data.test_targets),
        "nll": nll(outputs.log_softmax(-1), data.test_targets),
        "error_before_coding": error_percent(trained.softmax(-1), data.test_targets),
        "num_weights": bnn.posterior.num_weights,
        "weights_left": num_nonzero(net),
        "units": units_left(small),
        "bytes": len(content),
        "kl_bytes": size.kl_bytes,
        "file": _text(content),
    }


def decoded(result: Result) -> nn.Module:
    """Return the network of a result, decoded from the file that the result holds."""
    config = result["config"]
    net = make_network(config["network"], dropout_input=config["dropout_input"])
    return decompressed(base64.b85decode(result["metrics"]["file"]), net)


def _text(content: bytes) -> str:
    return base64.b85encode(content).decode()


def _outputs(net: nn.Module, inputs: Tensor) -> Tensor:
    net.eval()
    with torch.no_grad():
        return torch.cat([net(part) for part in inputs.split(_ROWS)]).double()


def summary(of: Sequence[Result]) -> list[str]:
    """Return error, times fewer weights, weights, units, bytes and KL of the results of a job."""
    metrics = [result["metrics"] for result in of]
    fewer = mean(each["num_weights"] / each["weights_left"] for each in metrics)
    units = [
        round(mean(values)) for values in zip(*(each["units"] for each in metrics), strict=True)
    ]
    return [
        mean_and_error([each["error"] for each in metrics], 2),
        f"{fewer:.0f}",
        f"{mean(each['weights_left'] for each in metrics):,.0f}",
        "-".join(map(str, units)),
        f"{mean(each['bytes'] for each in metrics):,.0f}",
        f"{mean(each['kl_bytes'] for each in metrics):,.0f}",
    ]


def table(results: Sequence[Result]) -> str:
    """Return a table for each network, the literature's rows above ours."""
    lines = [
        "Test error in percent of the network decoded from the file, after the last epoch; mean +- "
        "standard error over seeds. Weights left, units and bytes on disk are three axes, and each "
        "method of the literature is made for one. Units are the filters of a convolution and the "
        "inputs that a linear layer uses. The KL in nats / (8 ln 2) is about what bits-back coding "
        "of a weight sample would need. Empty: not reported.",
    ]
    for network, title in NETWORKS.items():
        own = [result for result in results if result["config"]["network"] == network]
        if not own:
            continue
        lines += ["", f"**{title}**", ""]
        lines += table_head(
            "| | seeds | error | times fewer weights | weights left | units | bytes | KL, bytes |"
        )
        lines += [
            f"| {row.method} | | {row.error} | {row.fewer} | | {row.units} | {row.size} | |"
            for row in REPORTED
            if row.network == network
        ]
        for name in RECIPES:
            if of := [result for result in own if result["job"] == name]:
                lines.append(f"| **{_title(name)}** | {len(of)} | {' | '.join(summary(of))} |")
    return "\n".join(lines) + "\n"


def _title(name: str) -> str:
    kind = name.rpartition("-")[2]
    titles = {"fast": "bayesify, fast", "error": "bayesify, least error"} | {
        each: f"bayesify, few {each}" for each in ("weights", "bytes", "units")
    }
    title = titles.get(kind, "bayesify")
    return f"{title}, images moved" if "moved" in RECIPES[name] else title


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the error by the size of the file, a panel for each network of the literature."""
    from bayesify.plots.compared import Curve, curves_compared

    panels: dict[str, list[Curve]] = {}
    for network, title in NETWORKS.items():
        curves = []
        for name in RECIPES:
            of = [
                r["metrics"]
                for r in results
                if r["job"] == name and r["config"]["network"] == network
            ]
            if of:
                sizes = [each["bytes"] / 1000.0 for each in of]
                curves.append(
                    Curve(_title(name), sizes, [[each["error"] for each in of]], points=True)
                )
        reported = [row for row in REPORTED if row.network == network and row.size and row.error]
        if curves and reported:
            panels[title] = curves + [
                Curve(
                    row.method,
                    [float(row.size.replace(",", "")) / 1000.0],
                    [[float(row.error)]],
                    reported=True,
                    points=True,
                )
                for row in reported
            ]
    if not panels:
        return {}
    drawn = curves_compared(panels, xlabel="file (kB)", ylabel="test error (%)")
    return {"compression": drawn}


EXPERIMENT = Experiment(
    name="compression",
    source="networks of Molchanov et al. 2017, Louizos et al. 2017 and others on MNIST",
    reported="LeNet-300-100: 1.92 % with 68 times fewer weights, 1.9 % in 8.56 kB; LeNet-5-Caffe: "
    ".75 % with 280 times fewer, .69 % in 3.03 kB",
    seeds=(0, 1, 2),
    memory_mb=1200,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
    half_precision=True,
    on_gpu=True,
)
