"""Export a table's run as one ONNX graph from raw columns to predictions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bayesify.distributions.posteriors import Delta
from bayesify.export.metadata import METADATA_KEY, ExportMetadata
from bayesify.export.onnx import check_installed, encoded, loaded_session, onnx_path
from bayesify.export.report import ExportError, ExportReport
from bayesify.export.table_columns import (
    INNER,
    constants,
    example_values,
    input_names,
    raw_columns,
    value_nodes,
)
from bayesify.export.table_network import TableNetwork, used_columns
from bayesify.export.tracing import TracedNetwork
from bayesify.io.files import atomic_write
from bayesify.module.bayesian import BayesianModule
from bayesify.tabular.columns import Column, EncodedColumn, RangedColumn
from bayesify.tabular.schema import TableSchema

if TYPE_CHECKING:
    import onnx

__all__ = ["export_table"]

_NETWORK = INNER[1]
_COLUMN = "outside_column"


def export_table(
    bnn: BayesianModule,
    schema: TableSchema,
    path: str | os.PathLike[str],
    *,
    num_samples: int = 32,
    quantiles: Sequence[float] = (0.025, 0.5, 0.975),
    thresholds: Mapping[str, float] | None = None,
) -> ExportReport:
    """Export the network of a table to an ONNX file that takes raw columns.

    The inputs are the columns by name, each of shape (N,): numbers as float64, with nan for a
    missing value; dates as days since 1970, with fractions; categories, and words for yes and no,
    as texts, with ``""`` for a missing value. The graph holds everything between them and the
    predictions of ``bayesify predict``: scaling, scores, levels, missing values, the weight
    samples, the widening of rows outside the training data, and the units of the target.

    The outputs, each of shape (N,) where no other is given: for classes ``mean``, the probabilities
    (N, K), ``prediction``, the label as text, and ``total`` and ``epistemic``, in nats; for numbers
    ``mean``, ``std``, ``quantiles`` (N, Q), and ``total`` and ``epistemic``, which are variances.
    For both ``outside_training``, whether the row lies outside the training data, and
    ``outside_column``, in which column, or ``""``. Counts, and numbers with Student's t, have no
    ``quantiles``: ONNX has no operator for their distribution functions.

    The description of the file, see :func:`read_metadata`, has every column as its run stores it,
    with the name of its ``"input"``: the column's own, unless an output has it; and the names of
    the ``"unused"`` columns.

    Args:
        bnn: the trained network.
        schema: the schema of its table.
        path: the file, ending in ``.onnx``; an existing file is replaced.
        num_samples: number of weight samples, those of ``bnn.predict``; 0 for the mean weights.
        quantiles: levels between 0 and 1.
        thresholds: as for :class:`ExportMetadata`.

    Returns:
        A report with the largest difference from PyTorch and the size of the file.

    Raises:
        ExportError: a column holds texts, or the outputs are others in ONNX Runtime; nothing is
            written.
        ValueError: the file's name does not end in ``.onnx``, ``num_samples`` is negative, or a
            level is out of range.
        ModuleNotFoundError: the extra ``onnx`` is not installed.
        OSError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> from bayesify.tabular.columns import NumberColumn
        >>> from bayesify.tabular.model import TableNet, table_baseline
        >>> from bayesify.tabular.schema import Target
        >>> target = Target("sold", "classification", classes=("no", "yes"))
        >>> schema = TableSchema((NumberColumn(name="age"),), target)
        >>> bnn = table_baseline(TableNet(1, (4,), 2), seed=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export_table(bnn, schema, f"{folder}/net.onnx")
        ...     session = loaded_session(report.path.read_bytes())
        >>> found = session.run(["prediction"], {"age": np.array([30.0])})
        >>> report.inputs, found[0][0] in target.classes
        (('age',), True)
    """
    place = onnx_path(path)
    columns = used_columns(schema)
    by_network = [column for column in columns if isinstance(column, EncodedColumn)]
    if by_network:
        raise ExportError(
            f"columns must be numbers, dates, categories or flags, got {by_network[0].kind}s in "
            f"{by_network[0].name!r}, which a pretrained network reads outside of a graph; train "
            "without it, or use bayesify serve or predict"
        )
    if not columns:
        raise ExportError("the table must have a column that the network uses, got none")
    check_installed()
    from onnx import helper

    network = TableNetwork(bnn, schema, num_samples=num_samples, quantiles=quantiles)
    values = example_values(columns)
    traced = TracedNetwork.of(network, torch.from_numpy(values))
    outputs = [*traced.outputs]
    classes = schema.target.classes
    unused = {*schema.dropped, *schema.carried, *(column.name for column in schema.columns)}
    if classes:
        outputs.insert(1, "prediction")
    names = input_names(columns, outputs)
    model = _model(encoded(traced, None), columns, names, outputs, classes)
    description = ExportMetadata(
        "classification" if classes else "regression",
        0 if isinstance(bnn.posterior, Delta) else num_samples,
        classes=classes,
        input={
            "kind": "table",
            "target": schema.target.name,
            "columns": [
                {"input": name, **column.to_json()}
                for name, column in zip(names, columns, strict=True)
            ],
            "unused": sorted(unused - {column.name for column in columns}),
        },
        thresholds=dict(thresholds or {}),
        quantiles=network.quantiles,
    )
    helper.set_model_props(model, {METADATA_KEY: description.to_json()})
    payload: bytes = model.SerializeToString()

    def run(tensor: Tensor) -> list[Tensor]:
        raw = raw_columns(columns, names, tensor.numpy())
        found = dict(zip(outputs, session.run(outputs, raw), strict=True))
        if classes and [classes[i] for i in found["mean"].argmax(-1)] != [*found["prediction"]]:
            raise ValueError("the labels are not those of the largest probabilities")
        places = {name: place for place, name in enumerate(_outside_names(columns))}
        found[_COLUMN] = np.array([places[name] for name in found[_COLUMN]])
        return [torch.from_numpy(np.asarray(found[name])) for name in traced.outputs]

    session = loaded_session(payload)
    difference = traced.check(run)
    atomic_write(place, payload)
    return ExportReport(place, len(payload), tuple(names), tuple(outputs), difference)


def _model(
    network: bytes,
    columns: Sequence[Column],
    names: Sequence[str],
    outputs: Sequence[str],
    classes: Sequence[str],
) -> onnx.ModelProto:
    """Return the graph from raw columns, around the graph from values to numbers."""
    import onnx
    from onnx import TensorProto, compose, helper

    inner = compose.add_prefix(onnx.load_from_string(network), _NETWORK)
    parts = [f"columns/{place}" for place in range(len(columns))]
    # The nodes in the order of their computation: columns, network, labels.
    nodes = [
        node
        for column, name, part in zip(columns, names, parts, strict=True)
        for node in value_nodes(column, name, part)
    ]
    nodes.append(helper.make_node("Concat", parts, [inner.graph.input[0].name], axis=1))
    nodes += inner.graph.node
    numbers = {value.name.removeprefix(_NETWORK): value for value in inner.graph.output}
    texts = {_COLUMN: _outside_names(columns)}
    if classes:
        texts["prediction"] = [*classes]
        nodes.append(
            helper.make_node("ArgMax", [f"{_NETWORK}mean"], ["columns/place"], axis=1, keepdims=0)
        )
    found, constant = [], constants()
    for name in outputs:
        if name in texts:
            table, index = f"columns/{name}", f"{_NETWORK}{name}"
            constant.append(_texts(table, texts[name]))
            place = "columns/place" if name == "prediction" else index
            nodes.append(helper.make_node("Gather", [table, place], [name]))
            found.append(helper.make_tensor_value_info(name, TensorProto.STRING, ["batch"]))
        else:
            nodes.append(helper.make_node("Identity", [f"{_NETWORK}{name}"], [name]))
            value = onnx.ValueInfoProto()
            value.CopyFrom(numbers[name])
            value.name = name
            found.append(value)
    kinds = [
        TensorProto.DOUBLE if isinstance(column, RangedColumn) else TensorProto.STRING
        for column in columns
    ]
    used = {name for node in nodes for name in node.input}
    constant = [each for each in constant if each.name in used]
    graph = helper.make_graph(
        nodes,
        "table",
        [
            helper.make_tensor_value_info(*each, ["batch"])
            for each in zip(names, kinds, strict=True)
        ],
        found,
        [*constant, *inner.graph.initializer],
    )
    opsets = [*inner.opset_import, helper.make_opsetid("ai.onnx.ml", 4)]
    return helper.make_model(
        graph,
        opset_imports=opsets,
        ir_version=inner.ir_version,
        functions=inner.functions,
        producer_name="bayesify",
    )


def _outside_names(columns: Sequence[Column]) -> list[str]:
    """Return the texts of the output ``outside_column`` by the network's number."""
    return ["", *(column.name for column in columns)]


def _texts(name: str, texts: Sequence[str]) -> onnx.TensorProto:
    from onnx import numpy_helper

    return numpy_helper.from_array(np.array(texts, dtype=object), name)
