"""Several networks of one architecture in one step, over a leading axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesify.distributions.posteriors import MeanFieldGaussian, Moments, WeightDraw
from bayesify.distributions.structured import StructuredGaussian
from bayesify.estimators import ForwardPass, stateless
from bayesify.estimators.network_state import snapshot
from bayesify.module.inputs import Inputs, arguments_of
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.training.backends.alike import difference
from bayesify.training.backends.backend import (
    NOISE_OF,
    BackendName,
    Noise,
    NonFiniteLossError,
    StepOptions,
    check_same_noise,
    require_finite,
)
from bayesify.training.backends.joint_pass import explained_errors, unchanged_attributes
from bayesify.training.backends.leaves import (
    CounterKey,
    EditedInPlaceError,
    LeafPosterior,
    ParameterGradients,
    leaf_views,
)
from bayesify.training.backends.recorded_noise import (
    DrawnKey,
    NoiseRequest,
    RecordingKey,
    raise_unforeseen_use,
)
from bayesify.training.backends.replica_updates import (
    AutogradUpdates,
    KernelUpdates,
    ReplicaUpdates,
)
from bayesify.training.backends.requirements import why_not_compiled, why_own_code
from bayesify.training.elbo import ELBO, ELBOTerms, detached
from bayesify.training.kernel.compiler import CompilerError
from bayesify.training.kernel.formulas import leaf_kind

__all__ = ["ReplicaBackend"]


class ReplicaBackend:
    """Train K independent networks in one step: one vmapped pass for all of them.

    Their parameters and buffers become views of tensors with a leading axis until :meth:`release`.
    Each network becomes what it would have become alone under the same backend, to rounding.

    Args:
        elbos: K objectives over networks of one architecture; seeds, priors, initial values,
            temperatures and numbers of examples may differ.
        optimizers: one for each.
        backend: ``"compiled"`` for the kernel, ``"autograd"`` for any prior and optimiser, or
            ``"auto"`` for the first where it supports all networks.
        noise: of the run that is resumed; None for a new one.

    Raises:
        ValueError: the networks do not go together, or ``backend`` does not support them.
        CompilerError: the kernel cannot be compiled on this machine.
    """

    noise: Noise

    def __init__(
        self,
        elbos: Sequence[ELBO],
        optimizers: Sequence[Optimizer],
        backend: BackendName = "auto",
        *,
        noise: Noise | None = None,
    ) -> None:
        _check(elbos, optimizers)
        reason = _why_no_kernel(elbos, optimizers, backend, noise)
        self._elbos = list(elbos)
        self._shared: dict[str, Tensor] = {}
        try:
            self._prepare(optimizers, backend, noise, reason)
        except BaseException:
            self.release()
            raise

    def _prepare(
        self,
        optimizers: Sequence[Optimizer],
        backend: BackendName,
        noise: Noise | None,
        reason: str | None,
    ) -> None:
        elbos = self._elbos
        self._first = first = elbos[0].bnn
        self._kind = leaf_kind(first.estimator)
        self._means: dict[str, Tensor] = {}
        if self._kind != "weights":
            means = _stacked([{"mean": elbo.bnn.posterior.mean} for elbo in elbos])["mean"]
            self._means = leaf_views(first.layout, means)
        self._addresses = [elbo.bnn.posterior.mean.data_ptr() for elbo in elbos]
        leaf = torch.stack([torch.empty_like(elbo.bnn.posterior.mean.detach()) for elbo in elbos])
        updater: ReplicaUpdates | None = None
        if reason is None:
            try:
                updater = KernelUpdates(elbos, optimizers, leaf)
            except CompilerError as error:
                if backend != "auto" or noise is not None:
                    raise
                reason = str(error)
        if updater is None:
            updater = AutogradUpdates(elbos, optimizers, leaf)
        self._updater = updater
        self.noise = "counter" if reason is None else "generator"
        name = "compiled" if reason is None else "autograd"
        detail = updater.description if reason is None else reason
        self.description = f"{name}, {len(elbos)} networks at once" + (
            f" ({detail})" if detail else ""
        )
        self._leaves = leaf_views(first.layout, leaf)
        nets = [elbo.bnn.net for elbo in elbos]
        every = [_slots(net, "_parameters") for net in nets]
        self._shared = {
            name: tensor
            for name, tensor in every[0].items()
            if _is_shared([each[name] for each in every])
        }
        self._own = [
            {name: each for name, each in slots.items() if name not in self._shared}
            for slots in every
        ]
        self._rest = _stacked(self._own)
        self._buffers = _stacked([_slots(net, "_buffers") for net in nets])
        for name, tensor in self._rest.items():
            tensor.requires_grad_(any(own[name].requires_grad for own in self._own))
        self._requests: dict[object, list[NoiseRequest]] = {}

    def step(
        self, inputs: Inputs, targets: Tensor, options: StepOptions, *, separate: bool = False
    ) -> list[ELBOTerms]:
        """Make one step of each network; see ``Backend.step``.

        Args:
            inputs: B_i examples, with a leading axis of size K where they are separate.
            targets: likewise.
            options: what changes from step to step; there is no ``share``.
            separate: whether each network has examples of its own.
        """
        self._check_moments()
        self._updater.begin()
        leaves = [*self._leaves.values(), *self._means.values()]
        versions = [leaf._version for leaf in leaves]
        outputs = self._outputs(inputs, separate=separate)
        if versions != [leaf._version for leaf in leaves]:
            raise EditedInPlaceError("where networks train at once; train each by fit")
        nlls, found = [], []
        batch_index, kl_scale, with_kl = options[:3]
        for k, elbo in enumerate(self._elbos):
            own = outputs[k].unsqueeze(0)
            nll = elbo.nll(own, targets[k] if separate else targets)
            factor = elbo.kl_factor(own.shape[1], batch_index=batch_index, kl_scale=kl_scale)
            nlls.append(nll)
            draw = self._updater.draw(k) if with_kl else None
            found.append(_terms(elbo, draw, nll.detach(), detached(own), factor, with_kl=with_kl))
        for elbo in self._elbos:
            elbo.count_step()
        for k, (elbo, terms) in enumerate(zip(self._elbos, found, strict=True)):
            try:
                require_finite(elbo, terms)
            except NonFiniteLossError as error:
                error.network = k
                raise
        residuals = self._updater.update(
            *self._backward(torch.stack(nlls).sum()),
            [terms.kl_factor for terms in found],
            with_residual=options.with_residual,
        )
        pairs = zip(found, residuals, strict=True)
        return [terms._replace(std_residual=residual) for terms, residual in pairs]

    def check_modules(self) -> None:
        """Raise ValueError where a callback has given a network modules of other classes.

        One pass of the first network's modules computes the outputs of all.
        """
        first, *others = (
            # By name: a class that a function defines is another one for each network.
            {name: type(module).__qualname__ for name, module in elbo.bnn.net.named_modules()}
            for elbo in self._elbos
        )
        for number, kinds in enumerate(others, 1):
            if kinds != first:
                names = first.keys() | kinds.keys()
                name = min(name for name in names if first.get(name) != kinds.get(name))
                raise ValueError(
                    "networks that are trained at once must keep their modules, but the module "
                    f"{name!r} of network {number} is no longer of the class of that of network 0; "
                    "change it before the training, or train each by fit"
                )

    def release(self) -> None:
        """Give each network tensors of its own again."""
        shared = {tensor.data_ptr() for tensor in self._shared.values()}
        for elbo in self._elbos:
            net, mean = elbo.bnn.net, elbo.bnn.posterior.mean
            for tensor in (mean, *net.parameters(), *net.buffers()):
                if tensor.data_ptr() not in shared:
                    tensor.data = tensor.data.clone()

    def _check_moments(self) -> None:
        """Raise ValueError where the leaves, views of the means, are not what a pass needs."""
        for k, (elbo, address) in enumerate(zip(self._elbos, self._addresses, strict=True)):
            q = elbo.bnn.posterior
            if self._means and (q.mask is not None or q.mean.data_ptr() != address):
                what = "be pruned" if q.mask is not None else "get another tensor as its mean"
                name = type(elbo.bnn.estimator).__name__
                raise ValueError(
                    f"network {k} must not {what} while networks train at once under {name}; "
                    "train it by fit, or change its mean in place"
                )

    def _backward(self, nll: Tensor) -> tuple[ParameterGradients, ParameterGradients]:
        self._updater.forget_gradients()
        tensors = (*self._leaves.values(), *self._means.values(), *self._rest.values())
        for tensor in tensors:
            tensor.grad = None
        if nll.requires_grad:  # not where a pass used no weight at all
            with explained_errors():
                nll.backward()
        for name, tensor in self._rest.items():
            if tensor.grad is not None:
                for own, gradient in zip(self._own, tensor.grad, strict=True):
                    if own[name].requires_grad:  # others may have frozen it
                        own[name].grad = gradient
        gradients = [leaf.grad for leaf in self._leaves.values()]
        if not self._means:
            return gradients, []
        return [mean.grad for mean in self._means.values()], gradients

    def _outputs(self, inputs: Inputs, *, separate: bool) -> Tensor:
        args, kwargs = arguments_of(inputs)
        data = 0 if separate else None
        noise: list[Tensor] = []
        names: tuple[str, ...] = ()
        if self._means:
            one = args, dict(kwargs)
            if separate:
                one = tuple(each[0] for each in args), {n: v[0] for n, v in kwargs.items()}
            names = self._first._local_names(False, *one[0], **one[1])
            noise = self._draw_noise(names, *one)

        def run(
            leaves: Mapping[str, Tensor],
            means: Mapping[str, Tensor],
            noise: list[Tensor],
            others: Mapping[str, Tensor],
            args: tuple[Any, ...],
            kwargs: Mapping[str, Any],
        ) -> tuple[Tensor, dict[str, Tensor]]:
            net, replaced = self._first.net, dict[str, Tensor]()

            def forward(tensors: Mapping[str, Tensor]) -> Any:
                given = {**self._first.placed(tensors), **self._shared, **others}
                return stateless.run_with(net, given, args, kwargs, replaced=replaced)

            if not means:
                return self._first.tensor_of(forward(leaves)), replaced
            key = DrawnKey(0, Stream.TRAINING, 0, noise)
            outputs = self._run_estimator(forward, names, key, means, leaves, args, kwargs)
            return outputs, replaced

        run_all = torch.vmap(run, in_dims=(0, 0, 0, 0, data, data), randomness="different")
        others = {**self._rest, **self._buffers}
        with explained_errors(), unchanged_attributes(self._first.net):
            outputs, replaced = run_all(self._leaves, self._means, noise, others, args, kwargs)
        with torch.no_grad():
            for name, held in self._buffers.items():
                buffer = replaced.get(name, held)
                if buffer.shape != held.shape:
                    raise ValueError(
                        "the networks cannot be run at once: a forward pass gives the buffer "
                        f"{name!r} of shape {tuple(held.shape[1:])} the shape "
                        f"{tuple(buffer.shape[1:])}; train each by fit"
                    )
                if buffer is not held:
                    held.copy_(buffer)
        assert isinstance(outputs, Tensor)
        return outputs

    def _run_estimator(
        self,
        forward: Any,
        names: Sequence[str],
        key: NoiseKey,
        means: Mapping[str, Tensor],
        spreads: Mapping[str, Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Tensor:
        bnn = self._first
        moments = Moments(means, spreads, squared=self._kind == "variances")
        posterior = LeafPosterior(bnn.posterior.mean, moments)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        call = ForwardPass(
            layout=bnn.layout,
            forward=forward,
            batch_size=tensors[0].shape[0] if tensors else None,
            local_names=lambda: names,
            snapshot=lambda: lambda: None,
            on_unexpected_use=raise_unforeseen_use,
        )
        outputs, _ = bnn.estimator.run(call, posterior, key, range(1))
        return self._first.tensor_of(outputs[0])

    def _draw_noise(
        self, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Tensor]:
        """The noise that each network would draw alone, with a leading axis of size K."""
        shapes = [getattr(value, "shape", None) for value in (*args, *kwargs.values())]
        kind = str(shapes), torch.is_autocast_enabled()
        if kind not in self._requests:
            self._requests[kind] = self._trace_noise(names, args, kwargs)
        return [
            torch.stack([self._draw_one(k, request) for k in range(len(self._elbos))])
            for request in self._requests[kind]
        ]

    def _draw_one(self, k: int, request: NoiseRequest) -> Tensor:
        bnn, step = self._elbos[k].bnn, self._elbos[k].step
        key = NoiseKey(bnn.seed, Stream.TRAINING, step)
        kernel = self._updater.kernel(k)
        if kernel is not None:
            key = CounterKey(key.seed, key.stream, step, kernel)
        kind, place, size, dtype, device = request
        return key.numbers(kind, 0, place, size, dtype, device)

    def _trace_noise(
        self, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[NoiseRequest]:
        """Run the first network once and list the noise that its estimator asks for."""
        bnn = self._first
        key = RecordingKey(0, Stream.TRAINING, 0)
        undo = snapshot(bnn.net)
        try:
            self._run_estimator(
                lambda tensors: bnn.run_with_named(tensors, *args, **kwargs),
                names,
                key,
                {name: each[0].detach() for name, each in self._means.items()},
                {name: each[0].detach() for name, each in self._leaves.items()},
                args,
                kwargs,
            )
        finally:
            undo()
        return key.requests


def _terms(
    elbo: ELBO,
    draw: WeightDraw | None,
    nll: Tensor,
    outputs: Tensor,
    factor: float,
    *,
    with_kl: bool,
) -> ELBOTerms:
    if not with_kl:
        return ELBOTerms.without_kl(nll, outputs, factor, nll.new_full((), torch.nan))
    with torch.no_grad():
        kl, penalty = elbo.complexity(draw, elbo.step, range(1))
    return ELBOTerms(nll + factor * (kl + penalty), nll, kl, penalty, outputs, factor)


def _why_no_kernel(
    elbos: Sequence[ELBO],
    optimizers: Sequence[Optimizer],
    backend: BackendName,
    noise: Noise | None,
) -> str | None:
    """The reason why autograd updates the networks, empty if asked for; None for the kernel."""
    if backend == "closed-form":
        raise ValueError(
            'networks that are trained at once have no closed-form backend; use backend="compiled" '
            'or "autograd"'
        )
    check_same_noise(backend, noise)
    asked = NOISE_OF.get(backend)
    if "generator" in (asked, noise):
        return ""
    pairs = zip(elbos, optimizers, strict=True)
    reasons = [why_not_compiled(elbo, optimizer) for elbo, optimizer in pairs]
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None and "counter" in (asked, noise):
        raise ValueError(
            f"network {reasons.index(reason)} cannot be trained by the compiled backend: {reason}"
        )
    return reason


def _stacked(owned: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of the networks with a leading axis, of which the networks' own become views."""
    stacked: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}  # what bears two names is one
    for name, tensor in owned[0].items():
        if id(tensor) not in made:
            made[id(tensor)] = torch.stack([each[name].detach() for each in owned])
            for each, row in zip(owned, made[id(tensor)], strict=True):
                each[name].data = row
        stacked[name] = made[id(tensor)]
    return stacked


def _slots(net: nn.Module, kind: str) -> dict[str, Tensor]:
    """The parameters or buffers of each module, under one of its names."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in net.named_modules()
        for name, value in getattr(module, kind).items()
        if value is not None
    }


def _is_shared(tensors: Sequence[Tensor]) -> bool:
    """Whether no network trains these and they are one memory, as those of a pretrained body."""
    places = {(each.data_ptr(), each.shape, each.stride()) for each in tensors}
    return len(places) == 1 and not any(each.requires_grad for each in tensors)


def _check(elbos: Sequence[ELBO], optimizers: Sequence[Optimizer]) -> None:
    if not elbos or len(elbos) != len(optimizers):
        raise ValueError(
            f"there must be at least one objective and an optimiser for each, got {len(elbos)} "
            f"and {len(optimizers)}"
        )
    if len({id(elbo.bnn) for elbo in elbos}) != len(elbos):
        raise ValueError("the objectives must be of different networks; wrap the net once for each")
    first = elbos[0].bnn
    for number, elbo in enumerate(elbos):
        bnn = elbo.bnn
        drawn = leaf_kind(bnn.estimator) == "weights"
        known = (MeanFieldGaussian, StructuredGaussian) if drawn else (MeanFieldGaussian,)
        reason = why_own_code(elbo, known)
        if type(elbo) is not ELBO:
            reason = f"the objective is a {type(elbo).__name__}"
        if reason is None and elbo.num_samples > 1:
            reason = f"its step takes {elbo.num_samples} weight samples, not one"
        elif reason is None and bnn.posterior.mask is not None and not drawn:
            reason = f"it is pruned, which {type(bnn.estimator).__name__} does not support here"
        if reason is not None:
            raise ValueError(f"network {number} cannot be trained with others at once: {reason}")
        differs = difference(first, bnn)
        if differs is not None:
            raise ValueError(
                "the networks must be of one architecture, with one estimator, on one device, "
                f"with priors of one kind, but network {number} differs from network 0 in "
                f"{differs}, or the two cannot be compared there; train each by fit"
            )
