"""In whatever order gradients come, are dropped and are taken: the buffer has the sums that a dictionary would have."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zeroshard.config.layout import FlatLayout, flat_layout
from zeroshard.states import local_gradient
from zeroshard.states.local_gradient import LocalGradient

SHAPES = [(3, 5), (), (0,), (70,)]
"""A matrix, a scalar, a parameter without elements, and one that is longer than the padding before it."""

indices = st.integers(0, len(SHAPES) - 1)
values = st.integers(-7, 7)
"""Small integers: 30 of them add up exactly in 16 bits too."""
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), indices, values),
        st.tuples(st.just("add"), indices, values),  # twice, so that backward passes are often complete
        st.tuples(st.just("drop"), indices, st.just(0)),
        st.tuples(st.sampled_from(["begin_backward", "take", "clear"]), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@pytest.fixture(autouse=True)
def _new_memory_is_nan() -> Iterator[None]:
    """Deterministic algorithms fill the memory that ``torch.empty`` returns with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Model:
    """What ``LocalGradient`` promises, said in the plainest way."""

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self.clear()

    def clear(self) -> None:
        self.sums: dict[int, int] = {}
        self.came: set[int] = set()
        self.empty = True
        self.added = False
        """Some parameter came more than once, so that the sum is in the accumulation dtype."""

    def begin_backward(self) -> None:
        self.came.clear()

    def add(self, index: int, value: int) -> None:
        self.added = self.added or index in self.sums
        self.sums[index] = self.sums.get(index, 0) + value
        self.came.add(index)
        self.empty = False

    def drop(self, index: int) -> None:
        self.sums.pop(index, None)
        self.came.discard(index)

    def whole(self) -> Tensor:
        whole = torch.zeros(self._layout.numel)
        for index, value in self.sums.items():
            self._layout.slots[index].view(whole).fill_(value)
        return whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ranks", [1, 3])
@settings(max_examples=60, deadline=None)
@given(operations=operations, together=st.sampled_from([1, 64, 2**20]))
def test_any_sequence_of_operations_gives_what_a_dictionary_of_sums_gives(
    dtype: torch.dtype, ranks: int, operations: list[tuple[str, int, int]], together: int
) -> None:
    layout = flat_layout([(f"p{number}", shape) for number, shape in enumerate(SHAPES)], ranks)
    local = LocalGradient(layout, dtype=dtype, accumulate=torch.float32, device=torch.device("cpu"))
    model = Model(layout)
    with mock.patch.object(local_gradient, "DEPOSIT_BYTES", together):
        for operation, index, value in [*operations, ("take", 0, 0), ("take", 0, 0)]:
            if operation == "add":
                local.add(index, torch.full(SHAPES[index], float(value), dtype=dtype))
                model.add(index, value)
            elif operation == "drop":
                local.drop(index)
                model.drop(index)
            elif operation == "begin_backward":
                local.begin_backward()
                model.begin_backward()
            elif operation == "take":
                taken = local.take()
                assert torch.equal(taken.float(), model.whole())
                assert taken.dtype is (torch.float32 if model.added else dtype)
                model.clear()
            else:
                local.clear()
                model.clear()
            assert local.complete == (len(model.came) == len(SHAPES))
            assert local.empty == model.empty
            assert bool(local.tensors()) is not local.empty


def test_the_sum_of_micro_batches_is_rounded_once_when_it_is_taken() -> None:
    layout = flat_layout([("weight", (4,))], 1)
    local = LocalGradient(layout, dtype=torch.bfloat16, accumulate=torch.float32, device=torch.device("cpu"))
    for _ in range(1 + 64):
        local.begin_backward()
        local.add(0, torch.full((4,), 256.0 if local.empty else 1.0, dtype=torch.bfloat16))
    assert layout.slots[0].view(local.take()).tolist() == [320.0] * 4
