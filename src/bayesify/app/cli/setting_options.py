"""Options of the command line that follow from the declarations of a run's settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, get_args, get_origin

import typer

from bayesify.app.runs import RunConfig
from bayesify.app.runs.declarations import Declaration, option
from bayesify.app.runs.settings import declarations

__all__ = ["with_settings"]


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each setting, in place of its ``**given``."""
    parameters = list(inspect.signature(command, eval_str=True).parameters.values())
    fixed = [each for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
    settings = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(name, declared)
        )
        for name, declared in declarations().items()
        if name not in inspect.signature(command).parameters
    ]
    # The order of the help: arguments, settings, then the options of this command alone.
    ordered = [*fixed[:2], *settings, *fixed[2:]]
    vars(command)["__signature__"] = inspect.Signature(
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in ordered]
    )
    return command


def _option(name: str, declared: Declaration) -> Any:
    """Return the annotation of a setting's option, from which Typer parses it."""
    *most, last = declared.choices or ("",)
    text = declared.setting.help.format(choices=f"{', '.join(most)} or {last}")
    default = _defaults(name)
    info = typer.Option(
        *([f"--{option(name)}"] if declared.kind is bool else []),  # a flag without its opposite
        help=text + (rf" \[default: {default}]" if default else ""),
        show_default=False,
        rich_help_panel=declared.setting.panel,
    )
    return Annotated[_parsed_as(declared.kind) | None, info]


def _parsed_as(kind: Any) -> Any:
    """Return the type by which Typer parses a setting; its choices are checked by the settings."""
    if get_origin(kind) is tuple:
        return list[str] if get_args(kind)[0] is str else str  # 400,400 is one value
    return next((each for each in (kind, *get_args(kind)) if each in (int, float, bool)), str)


#: Runs with defaults of their own.
_SPECIAL: dict[str, list[dict[str, Any]]] = {
    "one prior std": [{"prior": "gaussian"}, {"prior": "laplace"}],
    "lenet5": [{"net": "lenet5"}],
    "given --kl-warmup": [{"kl_warmup": 0.5}],
    "sgd baseline": [{"baseline": "sgd"}],
    "dropout baseline": [{"baseline": "dropout"}],
    "given --optimizer sgd": [{"optimizer": "sgd", "lr": 0.1}],
    "ivon": [{"optimizer": "ivon"}],
    "antithetic": [{"estimator": "antithetic"}],
    "tables": [{"target": "y", "task": task} for task in ("classification", "regression")],
    "folders": [{"dataset": "photos"}],
    "folders with the sgd baseline": [{"dataset": "photos", "baseline": "sgd"}],
    "PAC-Bayes": [{"objective": "f-quad"}],
    "spike-and-slab": [{"prior": "spike-and-slab"}],
    "lenet5 with a scale mixture": [{"net": "lenet5", "prior": "scale-mixture"}],
    "tables with a scale mixture": [
        {"target": "y", "task": task, "prior": "scale-mixture"}
        for task in ("classification", "regression")
    ],
    "classes with --encoder": [
        {"target": "y", "task": "classification", "text": ("t",), "encoder": "e"}
    ],
    "adapters": [
        {"target": "y", "task": "classification", "text": ("t",), "encoder": "e", "adapter": True}
    ],
}

#: Names of a kind's runs, in their order, where the help tells them apart.
_NAMES = {"tables": ("classes", "numbers")}

#: Kinds of runs within another kind, of which only what differs from that is shown.
_WITHIN = {
    "folders with the sgd baseline": "folders",
    "lenet5 with a scale mixture": "lenet5",
    "tables with a scale mixture": "tables",
    "classes with --encoder": "tables",
}


def _defaults(name: str) -> str:
    """Return a setting's defaults for the help: the usual one, and others with their runs.

    Example:
        >>> _defaults("dropout_input")
        '0; dropout baseline 0.2; PAC-Bayes 0.2'
        >>> _defaults("prior_std")[:40]
        '0.3; ivon 0.1; tables 7 (classes) or 1.5'
    """
    mnist = RunConfig.of("mnist")
    usual = _shown(getattr(mnist, name))
    texts, found, seen = [], {"": [usual]}, set() if name in mnist.idle() else {usual}
    for kind in _SPECIAL:
        few, many = (
            [_shown(getattr(run, name)) for run, settled in runs if name not in settled]
            for runs in _runs(kind)
        )
        values = ["by their size"] if few != many else list(dict.fromkeys(few))
        seen.update(values)
        found[kind] = values or [usual]
        if values and found[kind] != found[_WITHIN.get(kind, "")]:
            names = _NAMES.get(kind, ())
            if len(values) > 1 and len(values) == len(names):
                values = [f"{value} ({of})" for value, of in zip(values, names, strict=True)]
            texts.append(f"{kind} {' or '.join(values)}")
    if usual in seen or not seen:  # otherwise no run has it
        texts.insert(0, usual)
    return "; ".join(text for text in texts if text)


@cache
def _runs(kind: str) -> tuple[list[tuple[RunConfig, set[str]]], ...]:
    """Runs of a kind on few and on many rows, each with the settings that have no default there."""
    return tuple(
        [
            (run := RunConfig.of(num_rows=rows, **given), {*given, *run.idle()})
            for given in ({"dataset": "mnist", **case} for case in _SPECIAL[kind])
        ]
        for rows in (1_000, 1_000_000)
    )


def _shown(value: object) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)
