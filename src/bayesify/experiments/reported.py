"""Numbers that others reported, and tables in which ours stand beside them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["UCI", "uci_table"]

_NAMES = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")


def _by_table(*values: float) -> dict[str, float]:
    return dict(zip(_NAMES, values, strict=True))


#: Means over the standard splits of the nine tables: test nll in nats, test RMSE. Graves VI and
#: PBP from Hernandez-Lobato and Adams (2015), MC dropout from Mukhoti et al. (2018), the ensemble
#: from Lakshminarayanan et al. (2017), MCVI and DVI from Wu et al. (2019).
UCI: dict[str, dict[str, dict[str, float]]] = {
    "nll": {
        "Graves VI": _by_table(2.90, 3.39, 2.39, -0.90, -3.73, 2.89, 2.99, 0.98, 3.43),
        "PBP": _by_table(2.57, 3.16, 2.04, -0.90, -3.73, 2.84, 2.97, 0.97, 1.63),
        "MC dropout": _by_table(2.40, 2.93, 1.21, -1.14, -4.45, 2.80, 2.87, 0.93, 1.25),
        "ensemble of 5": _by_table(2.41, 3.06, 1.38, -1.20, -5.63, 2.79, 2.83, 0.94, 1.18),
        "MCVI": _by_table(2.46, 3.07, 1.03, -1.14, -5.94, 2.80, 2.87, 0.92, 0.68),
        "DVI": _by_table(2.41, 3.06, 1.01, -1.13, -6.29, 2.80, 2.85, 0.90, 0.47),
    },
    "rmse": {
        "PBP": _by_table(3.01, 5.67, 1.80, 0.10, 0.01, 4.12, 4.73, 0.64, 1.02),
        "MC dropout": _by_table(2.90, 4.82, 0.54, 0.079, 0.0007, 4.01, 4.27, 0.62, 0.67),
    },
}
_BEATEN = ("Graves VI", "PBP")
_MATCHED = "MCVI"


def uci_table(
    nll: Mapping[str, tuple[float, float]], rmse: Mapping[str, tuple[float, float]]
) -> str:
    """Markdown: test nll and RMSE by table, ours as mean +- standard error over the splits.

    Example:
        >>> print(uci_table({"yacht": (0.5, 0.1)}, {"yacht": (1.0, 0.2)}).splitlines()[-1])
        | **bayesify** | 1.00 +- 0.20 |
    """
    lines = ["Test nll, nats per datum; less is better.", "", *_grid(UCI["nll"], nll), ""]
    below_all = [name for name in nll if all(nll[name][0] < UCI["nll"][m][name] for m in _BEATEN)]
    other = UCI["nll"][_MATCHED]
    lower = [name for name in nll if nll[name][0] < other[name]]
    level = [name for name in nll if nll[name][0] <= other[name] + nll[name][1]]
    lines += [
        f"Lower than {' and '.join(_BEATEN)}: {len(below_all)} of {len(nll)}. No higher than "
        f"{_MATCHED} by more than our standard error: {len(level)}; lower: {len(lower)}.",
        "",
        "Test RMSE, in units of the target.",
        "",
        *_grid(UCI["rmse"], rmse),
    ]
    return "\n".join(lines) + "\n"


def _grid(
    reported: Mapping[str, Mapping[str, float]], ours: Mapping[str, tuple[float, float]]
) -> list[str]:
    lines = [f"| | {' | '.join(ours)} |", "|---" * (len(ours) + 1) + "|"]
    for method, numbers in reported.items():
        lines.append(f"| {method} | {' | '.join(f'{_quoted(numbers[name])}' for name in ours)} |")
    own = [f"{value:{_form(value)}} +- {error:{_form(value)}}" for value, error in ours.values()]
    return [*lines, f"| **bayesify** | {' | '.join(own)} |"]


def _quoted(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:g}"


def _form(value: float) -> str:
    return ".2f" if abs(value) >= 0.3 else ".3f" if abs(value) >= 0.03 else ".5f"
