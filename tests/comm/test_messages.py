"""Many small tensors as one message, and back."""

from __future__ import annotations

import pytest
import torch

from zeroshard.comm.messages import in_messages, pack, unpack

CPU = torch.device("cpu")


def test_tensors_of_any_dtype_and_shape_come_back_from_one_message() -> None:
    torch.manual_seed(0)
    tensors = [
        torch.tensor(True),
        torch.randn(3, 5),
        torch.tensor(7),
        torch.randn(2, 3, dtype=torch.float64).T,
        torch.empty(0, 4),
        torch.randn(5).to(torch.bfloat16),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.arange(5, dtype=torch.int8),
        torch.randn(4, 5)[:1, 2],
        torch.randn(()).expand(1),
    ]
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    copies[6] = torch.zeros(3, dtype=torch.complex64).conj()
    copies[7] = torch.zeros(3, dtype=torch.complex64).conj().imag
    assert copies[6].is_conj()
    assert copies[7].is_neg()
    (sent,), (received,) = in_messages(tensors, 1 << 20), in_messages(copies, 1 << 20)
    message = pack(sent, CPU)
    assert message.nbytes == sum(tensor.nbytes for tensor in tensors)
    unpack(message, received)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor.resolve_conj().resolve_neg(), copy.resolve_conj().resolve_neg())


def test_ranks_may_differ_in_how_a_tensor_lies_in_memory() -> None:
    source, others = torch.randn(1, 3), [torch.zeros(1, 3).expand(5, 3), torch.zeros(5, 3), torch.zeros(3, 5).T]
    for mine in (source.expand(5, 3), source.expand(5, 3).contiguous()):
        for other in others:
            message = pack([mine, torch.ones(2)], CPU)
            after = torch.zeros(2)
            unpack(message, [other, after])
            assert torch.equal(other, mine)
            assert torch.equal(after, torch.ones(2))


def test_messages_are_bounded_unless_one_tensor_is_larger() -> None:
    tensors = [torch.zeros(size) for size in (10, 10, 100, 10)]
    assert [[part.numel() for part in message] for message in in_messages(tensors, 80)] == [[10, 10], [100], [10]]
    assert not list(in_messages([], 80))


def test_a_sparse_buffer_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"sparse buffer .*to_dense"):
        list(in_messages([torch.eye(3).to_sparse()], 80))
