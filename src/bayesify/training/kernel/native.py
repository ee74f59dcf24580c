"""The kernel for CPUs: C++, compiled once on the user's machine and cached.

``torch.compile`` makes the same kernel from ``formulas.py``, but takes a minute to compile it where
this takes about a second, and its step takes more than four times as long; see docs/adr/0005.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayesify.training.convergence import SNR_BORDERS, StdResidual
from bayesify.training.kernel.compiler import compiled_library
from bayesify.training.kernel.formulas import PriorBlocks, Rates
from bayesify.training.kernel.interface import Recipe, SampledPosterior, SampleNoise, Vectors

__all__ = [
    "Checksums",
    "NativeIVON",
    "NativeKernel",
    "NativeSample",
    "is_readable",
    "ivon_library",
]


class NativeKernel:
    """See :class:`~bayesify.training.kernel.interface.Kernel`.

    Args:
        recipe: what to compute.
        vectors: on what; held, and written in place.
        key: the noise's, see ``counter_key``.

    Raises:
        CompilerError: there is no working C++ compiler.
    """

    def __init__(self, recipe: Recipe, vectors: Vectors, key: tuple[int, int]) -> None:
        several, forms = recipe.num_samples > 1 or recipe.from_sums, recipe.prior.forms
        library = compiled_library(
            recipe.prior.kind,
            recipe.prior.exact,
            recipe.optimizer,
            recipe.leaf,
            recipe.dtype,
            several=several,
            blocks=len(forms) > 1,
        )
        self._refresh, self._update = library.refresh, library.update
        self._draw, self._draw_signs = library.draw, library.draw_signs
        self._accumulate = library.accumulate if several else None
        self._noise = SampleNoise(key)
        for draw in (self._draw, self._draw_signs):
            draw.argtypes = [*[ctypes.c_uint32] * 3, *[ctypes.c_int64] * 2, ctypes.c_void_p]
        count = len(vectors.starts) - 1
        # Of the KL's estimate, in each sample that is accumulated, and in the update.
        part = 1.0 / recipe.num_samples
        self._parts = part, 0.0 if recipe.from_sums else part
        self._vectors = vectors  # their memory is what the addresses below point to
        self._starts = (ctypes.c_int64 * (count + 1))(*vectors.starts)
        self._prior_starts = (ctypes.c_int64 * (len(forms) + 1))(
            *recipe.prior.starts, vectors.mean.numel()
        )
        numbers = [float(number) for form in forms for number in form.numbers]
        self._priors = (ctypes.c_double * len(numbers))(*numbers)
        self._in_mean = (ctypes.c_void_p * count)()
        self._in_spread = (ctypes.c_void_p * count)()
        moments = [([*m, None, None])[:2] for m in (vectors.of_mean, vectors.of_rho)]
        # Where memory is far, to compute the standard deviations again takes less time.
        keeps_std = recipe.leaf == "weights" and not _is_far(vectors.leaf.numel())
        self._std = torch.empty_like(vectors.leaf) if keeps_std else None
        tensors = [vectors.mean, vectors.rho, vectors.leaf, self._std, *moments[0], *moments[1]]
        tensors += [vectors.prior_mean, vectors.mask, *([*vectors.sums, None, None])[:2]]
        named = dict(zip(_VECTORS, tensors, strict=True))
        _check(named, recipe.dtype, vectors.mean.numel())
        self._arguments = _Step(
            num_weights=vectors.mean.numel(),
            is_far=_is_far(vectors.mean.numel()),
            num_parameters=count,
            starts=ctypes.addressof(self._starts),
            in_mean=ctypes.addressof(self._in_mean),
            in_spread=ctypes.addressof(self._in_spread),
            num_priors=len(forms),
            prior_starts=ctypes.addressof(self._prior_starts),
            priors=ctypes.addressof(self._priors),
            borders=(ctypes.c_double * len(SNR_BORDERS))(*SNR_BORDERS),
            **{name: None if v is None else v.data_ptr() for name, v in named.items()},
        )

    def refresh(self, step: int) -> None:
        """See :meth:`~bayesify.training.kernel.interface.Kernel.refresh`."""
        self._at(step, then=step, noise=self._noise)
        self._refresh(ctypes.byref(self._arguments))

    def accumulate(
        self,
        in_mean: Sequence[Tensor | None],
        *,
        step: int,
        kl_factor: float,
        first: bool,
        then: SampleNoise | None,
    ) -> None:
        """See :meth:`~bayesify.training.kernel.interface.Kernel.accumulate`."""
        if self._accumulate is None:
            raise ValueError("this kernel was made for one weight sample a step")
        arguments = self._arguments
        held = _point(self._in_mean, in_mean, self._vectors.mean.dtype)
        arguments.kl_factor, arguments.first, arguments.part = kl_factor, first, self._parts[0]
        arguments.fills = then is not None
        self._at(step, then=step, noise=self._noise if then is None else then)
        self._accumulate(ctypes.byref(arguments))
        held.clear()

    def update(
        self,
        in_mean: Sequence[Tensor | None],
        in_spread: Sequence[Tensor | None],
        *,
        step: int,
        kl_factor: float,
        rates: tuple[Rates, Rates],
        with_residual: bool = False,
    ) -> StdResidual | None:
        """See :meth:`~bayesify.training.kernel.interface.Kernel.update`."""
        arguments = self._arguments
        dtype = self._vectors.mean.dtype
        held = [
            _point(self._in_mean, in_mean, dtype),
            _point(self._in_spread, in_spread, dtype),
        ]
        arguments.kl_factor, arguments.with_residual = kl_factor, with_residual
        arguments.part = self._parts[1]
        arguments.of_mean, arguments.of_rho = (_Rates(*map(float, each)) for each in rates)
        self._at(step, then=step + 1, noise=self._noise)
        self._update(ctypes.byref(arguments))
        held.clear()
        if not with_residual:
            return None
        return StdResidual(tuple(arguments.in_log_std), tuple(arguments.counts))

    def normals(self, key: tuple[int, int], step: int, size: int) -> Tensor:
        """See :meth:`~bayesify.training.kernel.interface.Kernel.normals`."""
        return self._drawn(self._draw, key, step, size)

    def signs(self, key: tuple[int, int], step: int, size: int) -> Tensor:
        """See :meth:`~bayesify.training.kernel.interface.Kernel.signs`."""
        return self._drawn(self._draw_signs, key, step, size)

    def _drawn(
        self, draw: Callable[..., object], key: tuple[int, int], step: int, size: int
    ) -> Tensor:
        made = torch.empty(size, dtype=self._vectors.mean.dtype)
        words = (word % 2**32 for word in (*key, step))
        draw(*words, size, torch.get_num_threads(), made.data_ptr())
        return made

    def _at(self, step: int, *, then: int, noise: SampleNoise) -> None:
        """Set the step, the step whose noise the leaf gets, and the key of that noise."""
        arguments = self._arguments
        arguments.step, arguments.next = step % 2**32, then % 2**32
        arguments.key0, arguments.key1 = (word % 2**32 for word in noise.key)
        arguments.sign = -1.0 if noise.opposite else 1.0
        arguments.num_threads = torch.get_num_threads()


class Checksums(NamedTuple):
    """Sums by which an edit of the tensors is found, also one that PyTorch does not count.

    They do not depend on the number of threads.
    """

    #: Of the weights, for the same mean.
    weights: int
    #: Of mean and rho.
    posterior: int


class NativeSample:
    """The weights of one sample with their KL, and the gradients of a loss of the two, in C++.

    Args:
        prior: of each block of weights, and how the KL is found.
        starts: where each parameter begins, and the end.
        dtype: of the vectors, float32 or float64.

    Raises:
        CompilerError: there is no working C++ compiler.
    """

    def __init__(self, prior: PriorBlocks, starts: Sequence[int], dtype: torch.dtype) -> None:
        library = compiled_library(
            prior.kind, prior.exact, "none", "weights", dtype, blocks=len(prior.forms) > 1
        )
        self._sample, self._update = library.sample, library.update
        self._sample.restype = ctypes.c_double
        self._dtype = dtype
        self._starts = (ctypes.c_int64 * len(starts))(*starts)
        self._prior_starts = (ctypes.c_int64 * (len(prior.forms) + 1))(*prior.starts, starts[-1])
        numbers = [float(number) for form in prior.forms for number in form.numbers]
        self._priors = (ctypes.c_double * len(numbers))(*numbers)

    def sample(
        self, of: SampledPosterior, step: int, noise: SampleNoise, out: Tensor
    ) -> tuple[float, Checksums]:
        """Write the weights; return their KL in nats and the checksums."""
        arguments = self._arguments(of, out)
        arguments.next = step % 2**32
        arguments.key0, arguments.key1 = (word % 2**32 for word in noise.key)
        arguments.sign = -1.0 if noise.opposite else 1.0
        kl: float = self._sample(ctypes.byref(arguments))
        return kl, Checksums(arguments.leaf_sum, arguments.posterior_sum)

    def gradients(
        self,
        of: SampledPosterior,
        weights: Tensor,
        in_weights: Sequence[Tensor | None],
        in_kl: float,
        out: tuple[Tensor, Tensor],
    ) -> Checksums:
        """Write the gradients in mean and rho; return the checksums as they are now.

        Args:
            of: the posterior.
            weights: the sample, shape (D,).
            in_weights: the gradients in the weights of each parameter; None for zeros.
            in_kl: the gradient in the KL.
            out: in mean and rho, each of shape (D,).
        """
        arguments = self._arguments(of, weights)
        pointers = (ctypes.c_void_p * len(in_weights))()
        held = _point(pointers, in_weights, self._dtype)
        arguments.in_mean = ctypes.addressof(pointers)
        arguments.mean_first, arguments.rho_first = (each.data_ptr() for each in out)
        arguments.kl_factor, arguments.part = in_kl, 1.0
        self._update(ctypes.byref(arguments))
        held.clear()
        return Checksums(arguments.leaf_sum, arguments.posterior_sum)

    def _arguments(self, of: SampledPosterior, leaf: Tensor) -> _Step:
        size = self._starts[len(self._starts) - 1]
        _check(of._asdict(), self._dtype, size)
        return _Step(
            num_weights=size,
            is_far=_is_far(size),
            num_parameters=len(self._starts) - 1,
            num_threads=torch.get_num_threads(),
            starts=ctypes.addressof(self._starts),
            num_priors=len(self._prior_starts) - 1,
            prior_starts=ctypes.addressof(self._prior_starts),
            priors=ctypes.addressof(self._priors),
            leaf=leaf.data_ptr(),
            **{k: None if v is None else v.data_ptr() for k, v in of._asdict().items()},
        )


def ivon_library(dtype: torch.dtype, *, blocks: bool) -> ctypes.CDLL:
    """Load the compiled kernel of :class:`NativeIVON`.

    Args:
        dtype: of the vectors.
        blocks: whether blocks of weights have priors of their own.

    Raises:
        CompilerError: there is no working C++ compiler.
    """
    return compiled_library("gaussian", True, "ivon", "weights", dtype, blocks=blocks)


class NativeIVON:
    """IVON's update by gradients in mean and rho, in C++.

    Args:
        prior: Gaussian, of each block of weights.
        size: D, the number of weights.
        dtype: of the vectors, float32 or float64.

    Raises:
        CompilerError: there is no working C++ compiler.
    """

    def __init__(self, prior: PriorBlocks, size: int, dtype: torch.dtype) -> None:
        forms = prior.forms
        self._apply = ivon_library(dtype, blocks=len(forms) > 1).ivon_update
        self._size, self._dtype = size, dtype
        self._prior_starts = (ctypes.c_int64 * (len(forms) + 1))(*prior.starts, size)
        numbers = [float(number) for form in forms for number in form.numbers]
        self._priors = (ctypes.c_double * len(numbers))(*numbers)

    def update(
        self,
        of: SampledPosterior,
        moments: tuple[Tensor, Tensor],
        gradients: tuple[Tensor, Tensor],
        rates: Rates,
    ) -> None:
        """Update mean, rho, momentum and h in place.

        Args:
            of: the posterior.
            moments: momentum and h, each of shape (D,).
            gradients: of the loss in mean and rho, each of shape (D,).
            rates: of the step.
        """
        named = {**of._asdict(), "mean_first": moments[0], "rho_first": moments[1]}
        given = {**named, "in_mean": gradients[0], "in_rho": gradients[1]}
        _check(given, self._dtype, self._size)
        pointers = [(ctypes.c_void_p * 1)(each.data_ptr()) for each in gradients]
        arguments = _Step(
            num_weights=self._size,
            is_far=_is_far(self._size),
            num_threads=torch.get_num_threads(),
            in_mean=ctypes.addressof(pointers[0]),
            in_spread=ctypes.addressof(pointers[1]),
            num_priors=len(self._prior_starts) - 1,
            prior_starts=ctypes.addressof(self._prior_starts),
            priors=ctypes.addressof(self._priors),
            of_mean=_Rates(*map(float, rates)),
            **{name: None if v is None else v.data_ptr() for name, v in named.items()},
        )
        self._apply(ctypes.byref(arguments))


def _is_far(num_weights: int) -> bool:
    """Whether the vectors of so many weights are too long to stay in a cache."""
    return num_weights > 2**20


def _check(named: Mapping[str, Tensor | None], dtype: torch.dtype, size: int) -> None:
    """Check everything that the compiled code relies on."""
    for name, tensor in named.items():
        wanted = torch.bool if name == "mask" else dtype
        if tensor is not None and not _fits(tensor, wanted, size):
            raise _misfit(name, tensor, wanted, size)


def is_readable(vector: Tensor, dtype: torch.dtype) -> bool:
    """Return whether compiled code can read a vector of any length, and autograd counts its edits.

    Example:
        >>> is_readable(torch.zeros(3), torch.float32), is_readable(torch.zeros(3), torch.bool)
        (True, False)
    """
    return (
        vector.dtype == dtype
        and vector.device.type == "cpu"
        and vector.is_contiguous()
        and not vector.is_neg()
        and not vector.is_inference()  # has no version, by which edits are found
    )


def _fits(tensor: Tensor, dtype: torch.dtype, size: int) -> bool:
    return (
        tensor.dtype == dtype
        and tensor.shape == (size,)
        and tensor.is_contiguous()
        and tensor.device.type == "cpu"
    )


def _misfit(name: str, tensor: Tensor, dtype: torch.dtype, size: int) -> ValueError:
    return ValueError(
        f"{name} must be a contiguous vector of {size} {dtype} on the CPU, got shape "
        f"{tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}; after a change of "
        "dtype make a new optimizer"
    )


def _point(
    pointers: ctypes.Array[ctypes.c_void_p],
    tensors: Sequence[Tensor | None],
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """Set the pointers to the tensors; the result keeps the tensors alive."""
    held: list[Tensor | None] = []
    for index, each in enumerate(tensors):
        tensor = each
        if each is not None and not (
            each.dtype is dtype and each.is_contiguous() and not each.is_neg()
        ):
            tensor = each.resolve_neg().to(dtype).contiguous()
        pointers[index] = None if tensor is None else tensor.data_ptr()
        held.append(tensor)
    return held


class _Rates(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in Rates._fields]


_VECTORS = (
    "mean",
    "rho",
    "leaf",
    "std",
    "mean_first",
    "mean_second",
    "rho_first",
    "rho_second",
    "prior_mean",
    "mask",
    "sum_mean",
    "sum_log_std",
)


class _Step(ctypes.Structure):
    """``struct Step`` of step.cpp, field for field."""

    _fields_ = [
        ("num_weights", ctypes.c_int64),
        ("num_parameters", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("in_mean", ctypes.c_void_p),
        ("in_spread", ctypes.c_void_p),
        ("num_priors", ctypes.c_int64),
        ("prior_starts", ctypes.c_void_p),
        ("priors", ctypes.c_void_p),
        *[(name, ctypes.c_void_p) for name in _VECTORS],
        ("key0", ctypes.c_uint32),
        ("key1", ctypes.c_uint32),
        ("step", ctypes.c_uint32),
        ("next", ctypes.c_uint32),
        ("is_far", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("fills", ctypes.c_int64),
        ("kl_factor", ctypes.c_double),
        ("part", ctypes.c_double),
        ("sign", ctypes.c_double),
        ("of_mean", _Rates),
        ("of_rho", _Rates),
        ("with_residual", ctypes.c_int64),
        ("borders", ctypes.c_double * len(SNR_BORDERS)),
        ("in_log_std", ctypes.c_double * (len(SNR_BORDERS) + 1)),
        ("counts", ctypes.c_int64 * (len(SNR_BORDERS) + 1)),
        ("leaf_sum", ctypes.c_uint64),
        ("posterior_sum", ctypes.c_uint64),
    ]
