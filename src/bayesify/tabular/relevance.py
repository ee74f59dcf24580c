"""The hyperprior of relevance: of many inputs few are expected to matter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor

from bayesify.noise.keys import process_count
from bayesify.tabular.model import TableNet
from bayesify.training.elbo import ELBO
from bayesify.training.streaming import StreamingELBO

__all__ = ["sparse_relevance"]

#: Inputs up to which relevance is free.
_FREE = 100


@contextmanager
def sparse_relevance(elbo: ELBO, total: float = 50.0) -> Iterator[None]:
    """Within the block, training expects that of more than 100 inputs few are relevant.

    The factor f of each input, see :class:`TableNet`, has the density ``(1 + f / t)^-2 / t`` (Lomax
    1954) with ``t = total / (F - 100)`` for F inputs. It favours small factors, and has a heavy
    tail. Factors are points, not random: without it, hundreds of them fit the noise of a table with
    about as many rows. ``-log p(f)`` is no part of the reported ELBO, and has its full weight while
    the KL warms up.

    Nothing changes for up to 100 inputs, for maximum likelihood (temperature 0), or where the
    posterior of earlier rows is the prior.

    Args:
        elbo: the objective that is trained within the block.
        total: the scale t, which is the median of a factor, times the number of inputs beyond 100.
            Infinite is no hyperprior.

    Example:
        >>> import torch, bayesify as bf
        >>> bnn = bf.BayesianModule(TableNet(200, (4,), 1, relevance=True), exclude=["log_*"])
        >>> elbo, factors = ELBO(bnn, num_data=10), bnn.net.log_relevance
        >>> with sparse_relevance(elbo):             # 2 f / (t + f) / N with t = 0.5
        ...     _ = elbo(torch.zeros(5, 200), torch.zeros(5, dtype=torch.long))
        ...     (0.0 * factors).sum().backward()
        >>> factors.grad[:2]
        tensor([0.1333, 0.1333])
    """
    with ExitStack() as stack:
        if elbo.temperature and not isinstance(elbo, StreamingELBO):
            for table in elbo.bnn.net.modules():
                if isinstance(table, TableNet) and table.log_relevance is not None:
                    _attach(stack, elbo, table.log_relevance, total)
        yield


def _attach(stack: ExitStack, elbo: ELBO, log_relevance: Tensor, total: float) -> None:
    excess = len(log_relevance) - _FREE
    if excess <= 0:
        return
    scale = total / excess
    # The processes of a training add up their gradients.
    part = elbo.temperature / (elbo.num_data * process_count())

    def pulled(gradient: Tensor) -> Tensor:
        if log_relevance.grad is not None:  # of the step's weight sample before
            return gradient
        factors = log_relevance.detach().exp()
        return gradient + part * 2.0 * factors / (scale + factors)

    stack.callback(log_relevance.register_hook(pulled).remove)
