"""Deep ensembles: mixtures of networks that were trained separately."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, Self

from torch import Tensor, nn

from bayesify.distributions.likelihoods import Likelihood
from bayesify.distributions.posteriors import Delta
from bayesify.io.files import StorageError, write_tensors
from bayesify.io.frozen_parameters import check_patterns
from bayesify.io.models import described_model, read_model, restore_model
from bayesify.module.bayesian import BayesianModule
from bayesify.module.inputs import Inputs, inputs_of
from bayesify.noise.arguments import whole_number
from bayesify.noise.keys import Stream, derived_seed
from bayesify.prediction.predictive import P_co

__all__ = ["DeepEnsemble"]

_KIND = "ensemble"


class DeepEnsemble(Generic[P_co]):
    """Networks trained separately from different initial values (Lakshminarayanan et al. 2017).

    The prediction is the mixture of their predictions in equal shares. If all members have point
    weights (``Delta``), each contributes one sample; otherwise each contributes ``num_samples``.

    Of members with a posterior it is the mixture of these posteriors. The mean of their free
    energies bounds the mixture's from above, since the KL is convex in its first argument, so that
    members that are trained alone train the mixture.

    Args:
        members: ``BayesianModule`` objects with likelihoods of one kind, each trained by ``fit``.

    Raises:
        TypeError: a member is not a ``BayesianModule``.
        ValueError: there is no member, or their likelihoods differ in kind.

    Example:
        >>> import torch, bayesify as bf
        >>> members = []
        >>> for seed in range(5):  # each with initial values of its own; then bf.fit each
        ...     _ = torch.manual_seed(seed)
        ...     members.append(bf.BayesianModule(nn.Linear(3, 2), posterior=bf.Delta, seed=seed))
        >>> p = bf.DeepEnsemble(members).predict(torch.zeros(4, 3), keep_samples=True)
        >>> p.mean.shape, p.samples.shape
        (torch.Size([4, 2]), torch.Size([5, 4, 2]))
    """

    def __init__(self, members: Sequence[BayesianModule[P_co]]) -> None:
        if isinstance(members, nn.Module) and not isinstance(members, nn.ModuleList):
            raise TypeError(
                f"members must be a list of networks, got one {type(members).__name__}; pass "
                "[member]"
            )
        self.members = list(members)
        if not self.members:
            raise ValueError("an ensemble needs at least one member, got none")
        for member in self.members:
            if not isinstance(member, BayesianModule):
                raise TypeError(
                    f"members must be BayesianModule objects, got {type(member).__name__}; wrap "
                    "a plain network: BayesianModule(net, posterior=Delta, likelihood=...)"
                )
        kinds = {_kind(member.likelihood) for member in self.members}
        if len(kinds) > 1:
            raise ValueError(
                f"members must have likelihoods of one kind, got {', '.join(sorted(kinds))}"
            )

    def predict(
        self,
        inputs: Inputs | Iterable[Any],
        num_samples: int = 100,
        *,
        keep_samples: bool = False,
        batch_size: int | Literal["all"] | None = None,
        max_memory: int | str | None = None,
        seed: int | None = None,
    ) -> P_co:
        """Predict with the mixture of the members' predictions.

        Args:
            inputs: as for ``BayesianModule.predict``.
            num_samples: number of weight samples of each member; ignored if all members have point
                weights.
            keep_samples: whether the result holds the prediction of every sample.
            batch_size: as for ``BayesianModule.predict``.
            max_memory: as for ``BayesianModule.predict``, for the prediction of one member. Those
                of all members are held until they are joined.
            seed: a seed for other weight samples; None stands for the members' seeds. Members never
                share noise, even if their seeds are equal.

        Raises:
            TypeError: ``num_samples`` or ``batch_size`` is no whole number.
            ValueError: one of them is below 1, ``max_memory`` is too small, there are no examples,
                or the members' predictions have different shapes.
        """
        num_samples = whole_number("num_samples", num_samples)
        net, device = self.members[0].net, self.members[0].posterior.mean.device
        inputs = inputs_of(inputs, device, net)
        points = all(isinstance(member.posterior, Delta) for member in self.members)
        own = [member.seed for member in self.members]
        seeds = [
            # Seeds must differ, since members that share noise would not be independent.
            derived_seed(first if seed is None else seed, Stream.PREDICTION, number)
            if seed is not None or first in own[:number]
            else first
            for number, first in enumerate(own)
        ]
        parts: list[Any] = [
            member.predict(
                inputs,
                1 if points else num_samples,
                keep_samples=keep_samples,
                batch_size=batch_size,
                max_memory=max_memory,
                seed=member_seed,
            )
            for member, member_seed in zip(self.members, seeds, strict=True)
        ]
        joined: P_co = type(parts[0]).joined(parts)
        return joined

    def save(self, path: str | os.PathLike[str], *, frozen: bool | Sequence[str] = True) -> None:
        """Save all members to one safetensors file, as ``bayesify.save`` does one.

        Args:
            path: the file; an existing file is replaced.
            frozen: as for ``bayesify.save``. A pretrained body that all members share is stored
                with each member, unless it is left out.

        Raises:
            OSError: the file cannot be written; an existing file is then unchanged.
            TypeError: ``frozen`` is neither a bool nor a sequence of patterns.
            ValueError: a pattern of ``frozen`` matches no frozen parameter of any member.

        Example:
            >>> import tempfile
            >>> net = nn.Linear(3, 2)
            >>> ensemble = DeepEnsemble([BayesianModule(net, seed=seed) for seed in range(2)])
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     ensemble.save(f"{folder}/ensemble.safetensors")
            ...     again = DeepEnsemble.load(f"{folder}/ensemble.safetensors", net)
            >>> [member.seed for member in again.members]
            [0, 1]
        """
        check_patterns(frozen, *(member.net for member in self.members))
        tensors: dict[str, Tensor] = {}
        members = []
        for number, member in enumerate(self.members):
            own, described = described_model(member, frozen)
            tensors |= {f"{number}.{name}": tensor for name, tensor in own.items()}
            members.append(described)
        write_tensors(Path(path), tensors, {"kind": _KIND, "members": members})

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        net: nn.Module | Sequence[nn.Module],
        **components: Any,
    ) -> Self:
        """Load an ensemble from a file of :meth:`save`.

        Args:
            path: the file.
            net: a network of the same architecture, as for ``bayesify.load``; or one for each
                member, where their architectures differ.
            components: ``likelihood``, ``prior``, ``estimator``, ``posterior`` and ``output`` of
                all members, as for ``bayesify.load``.

        Returns:
            The ensemble as it was saved, on the CPU.

        Raises:
            TypeError: ``path`` is no path, ``net`` no plain network, or there is no such component.
            ValueError: the number of networks is not that of the members.
            StorageError: the file is missing, truncated, altered, of another architecture or no
                ensemble's.
        """
        is_list = isinstance(net, Sequence) or type(net) is nn.ModuleList
        of_members: list[Any] | None = [*net] if is_list else None  # type: ignore[misc]
        tensors, meta = read_model(path, *([net] if of_members is None else of_members))
        if meta.get("kind") != _KIND:
            raise StorageError(f"{path} holds no ensemble; use bayesify.load for a single network")
        by_member: list[dict[str, Tensor]] = [{} for _ in meta["members"]]
        nets = [net] * len(by_member) if of_members is None else of_members
        if len(nets) != len(by_member):
            raise ValueError(
                f"there must be one network for all {len(by_member)} members or one for each, got "
                f"{len(nets)}"
            )
        for name, tensor in tensors.items():
            number, _, own = name.partition(".")
            by_member[int(number)][own] = tensor
        members: list[Any] = [
            restore_model(each, own, described, source=str(path), **components)
            for each, own, described in zip(nets, by_member, meta["members"], strict=True)
        ]
        return cls(members)


def _kind(likelihood: Likelihood) -> str:
    noise = "input-dependent " if getattr(likelihood, "input_dependent", False) else ""
    return noise + type(likelihood).__name__
