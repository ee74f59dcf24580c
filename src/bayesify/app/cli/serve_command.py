"""``bayesify serve``: predictions over HTTP, and a page to draw on or to fill in."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from bayesify.app.cli.opened_run import AsJson, opened
from bayesify.app.runs import RunError
from bayesify.app.serve.limits import ServiceLimits

if TYPE_CHECKING:
    from bayesify.app.serve.model import ServedModel

__all__ = ["serve"]

_NEEDED = ("fastapi", "uvicorn", "prometheus_client", "PIL", "onnx", "onnxruntime")


def serve(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run, or an ONNX file that bayesify export wrote.", metavar="RUN|FILE"
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; by default only this machine can connect.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Weight samples to average over; an ONNX file has its own. "
            r"\[default: 32, with an adapter as in training]",
            show_default=False,
        ),
    ] = None,
    pruned: Annotated[
        Path | None,
        typer.Option(
            help="Serve the pruned network of a run in this file, which prune --out wrote.",
            show_default=False,
        ),
    ] = None,
    level: Annotated[
        float | None,
        typer.Option(
            help=r"Probability of a regression's intervals. \[default: 0.95]", show_default=False
        ),
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(
            help="Share of the run's held-out examples that are answered; the service abstains "
            r"where the total uncertainty is above theirs. \[default: 0.95]",
            show_default=False,
        ),
    ] = None,
    max_batch: Annotated[
        int, typer.Option(help="Examples of several requests in one pass of the network.")
    ] = ServiceLimits.max_batch,
    batch_wait_ms: Annotated[
        float, typer.Option(help="Milliseconds that a request waits for others.")
    ] = ServiceLimits.batch_wait_ms,
    max_examples: Annotated[
        int, typer.Option(help="Examples in one request.")
    ] = ServiceLimits.max_examples,
    max_body_mb: Annotated[
        float, typer.Option(help="Megabytes of a request's body.")
    ] = ServiceLimits.max_body_mb,
    queue: Annotated[
        int, typer.Option(help="Requests in progress at a time; more get 503 and Retry-After.")
    ] = ServiceLimits.queue,
    timeout_s: Annotated[
        float, typer.Option(help="Seconds until a request gets 504.")
    ] = ServiceLimits.timeout_s,
    as_json: AsJson = False,
) -> None:
    """Serve the predictions of a run over HTTP, with uncertainties, and a page for people.

    POST /predict takes images, or rows by column name, as JSON, and answers with the prediction,
    probabilities or an interval, total and epistemic uncertainty, whether to abstain, and whether a
    row lies outside the training data. The page at / shows all of it while one draws a digit, opens
    an image or fills in a row. /openapi.json describes the requests, /health and /metrics are for
    operators. Texts and images that an --encoder read in training are read by it here too: it must
    be where it was.

    SIGTERM and Ctrl-C finish the requests in progress. There is no log-in: on another --host than
    this machine's own, put a proxy with one before the service.
    """
    lacking = [name for name in _NEEDED if find_spec(name) is None]
    if lacking:
        raise RunError(
            f"bayesify serve needs {', '.join(lacking)}; pip install 'bayesify[cli,serve]'"
        )
    from bayesify.app.serve.running import bound_socket, is_loopback, run, url_of
    from bayesify.app.serve.service import make_app

    limits = ServiceLimits(
        max_batch=max_batch,
        batch_wait_ms=batch_wait_ms,
        max_examples=max_examples,
        max_body_mb=max_body_mb,
        queue=queue,
        timeout_s=timeout_s,
    )
    console = Console(stderr=True)
    with bound_socket(host, port) as listening:
        with console.status("opening the model ..."):
            model = _opened(source, samples, pruned, level, coverage)
        card = model.card
        note = f"abstains above {card.threshold:.4g}: " if card.threshold is not None else ""
        console.print(Text(f"threshold: {note}{card.threshold_origin}"), soft_wrap=True)
        if not is_loopback(listening):
            warning = "warning: other machines can connect, and there is no log-in"
            console.print(Text(warning, style="yellow"), soft_wrap=True)
        app = make_app(model, limits)
        url = url_of(listening)

        def announce() -> None:
            if as_json:
                typer.echo(json.dumps({"url": url, "model": card.model_dump()}))
            console.print(Text(f"{source} at {url} (stop with Ctrl-C)"), soft_wrap=True)

        run(app, listening, timeout_s=timeout_s, on_start=announce)


def _opened(
    source: Path,
    samples: int | None,
    pruned: Path | None,
    level: float | None,
    coverage: float | None,
) -> ServedModel:
    if source.suffix == ".onnx" or source.is_file():
        given = {"samples": samples, "pruned": pruned, "level": level, "coverage": coverage}
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise RunError(
                f"{extra[0]} is for a run; an ONNX file has its own, set by bayesify export"
            )
        if source.is_file() and source.suffix != ".onnx":
            raise RunError(f"{source} must be the folder of a run or a file that ends in .onnx")
        from bayesify.app.serve.onnx_model import OnnxModel

        return OnnxModel(source)
    from bayesify.app.runs.abstention import COVERAGE
    from bayesify.app.runs.predict import chosen_level
    from bayesify.app.serve.run_model import RunModel

    run = opened(source)
    if samples is None:
        samples = run.config.test_samples if run.config.adapter else 32
    return RunModel(
        run,
        run.load_module(pruned),
        num_samples=samples,
        level=chosen_level(level, run.class_names),
        coverage=COVERAGE if coverage is None else coverage,
    )
