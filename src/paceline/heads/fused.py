"""Functions of tensors that are compiled where they run on a GPU."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def fused(function: Callable[..., T]) -> Callable[..., T]:
    """Few kernels instead of one for each operation; elsewhere the function as it is."""
    quick: list[Callable[..., T]] = []

    @wraps(function)
    def call(*given: Tensor) -> T:
        if not given[0].is_cuda:
            return function(*given)
        if not quick:
            quick.append(torch.compile(function, dynamic=True))
        return quick[0](*given)

    return call
