"""AdamW: the step, and the optimizer against torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from hasten.base.errors import ConfigError, ShapeError
from hasten.ops import native
from hasten.ops.adamw import adamw_, total_norm
from hasten.ops.adamw.cases import CASES, HYPER
from hasten.ops.adamw.optimizer import AdamW
from hasten.ops.adamw.reference import adamw
from hasten.ops.cases import Case, check_forward, select

pytestmark = pytest.mark.usefixtures("body")


@pytest.mark.parametrize(("case", "dtype"), select(CASES), ids=str)
def test_step(case: Case, dtype: torch.dtype) -> None:
    check_forward(case, dtype)


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 7), (3,))]


def give_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def assert_same(ours: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.data, b.data, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5, 1e6])
def test_equals_torch_with_clipping(max_grad_norm: float | None) -> None:
    ours, theirs = parameters(), parameters()
    options = {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1}
    a, b = AdamW(ours, max_grad_norm=max_grad_norm, **options), torch.optim.AdamW(theirs, **options)
    for step in range(5):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs, max_grad_norm) if max_grad_norm else None
        a.step()
        b.step()
        if norm is None:
            assert a.last_grad_norm is None
        else:
            assert a.last_grad_norm is not None
            torch.testing.assert_close(a.last_grad_norm, norm)
    assert_same(ours, theirs)


@pytest.mark.parametrize("first", [AdamW, torch.optim.AdamW])
def test_state_of_one_loads_in_the_other(first: type[torch.optim.Optimizer]) -> None:
    second = torch.optim.AdamW if first is AdamW else AdamW
    params, other = parameters(), parameters()
    a, b = first(params, lr=1e-2), second(other, lr=0.5)
    for step in range(3):
        give_gradients(params, step)
        a.step()
    with torch.no_grad():
        for p, q in zip(params, other, strict=True):
            q.copy_(p)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    assert a.state_dict()["param_groups"][0].keys() == b.state_dict()["param_groups"][0].keys()
    for step in range(3, 6):
        for optimizer, group in ((a, params), (b, other)):
            give_gradients(group, step)
            optimizer.step()
    assert_same(params, other)


def test_gradients_are_left_alone_and_versions_move() -> None:
    params = parameters()
    give_gradients(params, 0)
    before = [p.grad.clone() for p in params if p.grad is not None]
    versions = [p._version for p in params]
    AdamW(params, max_grad_norm=0.1).step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True) if p.grad is not None)
    assert all(p._version > v for p, v in zip(params, versions, strict=True))


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 15, 16385, 40000])
def test_gradients_of_any_dtype_and_size(size: int, grad_dtype: torch.dtype) -> None:
    param, grad, mean, square = (
        torch.randn(size),
        torch.randn(size).to(grad_dtype),
        torch.randn(size),
        torch.rand(size),
    )
    expected = adamw(param, grad, mean, square, torch.tensor(7.0), **HYPER, grad_scale=0.7)
    step = torch.tensor(7.0)
    adamw_([param], [grad], [mean], [square], [step], **HYPER, grad_scale=0.7)
    for value, other in zip((param, mean, square, step), expected, strict=True):
        torch.testing.assert_close(value, other, rtol=2e-6, atol=2e-7)


def test_gradients_that_are_not_finite_stay_so() -> None:
    param, grad = torch.ones(20), torch.ones(20)
    grad[3], grad[19] = float("nan"), float("inf")
    mean, square = torch.zeros(20), torch.zeros(20)
    adamw_([param], [grad], [mean], [square], [torch.tensor(0.0)], **HYPER)
    assert param.isnan().nonzero().squeeze(1).tolist() == [3, 19]
    assert mean[19].isinf()
    assert total_norm([grad]).isnan()
    assert total_norm([grad[4:]]).isinf()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_total_norm(dtype: torch.dtype) -> None:
    grads = [torch.randn(n).to(dtype) for n in (1, 513, 20000)] + [torch.randn(31, 7).to(dtype).t()]
    exact = torch.cat([g.double().flatten() for g in grads]).norm()
    norm = total_norm(grads)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else norm.dtype)
    torch.testing.assert_close(norm.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert total_norm([]) == 0
    if dtype == torch.float64 or native.refusal():
        return
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert total_norm(grads) == norm
    # A view with holes is no block of memory: torch's own norm runs.
    torch.testing.assert_close(total_norm([torch.ones(10)[::2]]), torch.tensor(5.0).sqrt())


def test_threads_do_not_change_a_bit() -> None:
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(0)
        columns = [
            [torch.rand(50001, generator=generator), torch.rand(3, generator=generator)] for _ in range(4)
        ]
        adamw_(*columns, [torch.tensor(1.0), torch.tensor(2.0)], **HYPER)
        results.append(columns[0])
    assert all(torch.equal(a, b) for r in results[1:] for a, b in zip(r, results[0], strict=True))


def test_scheduler_closure_and_parameters_without_gradient() -> None:
    params = parameters()
    give_gradients(params, 0)
    params[1].grad = None
    kept = params[1].detach().clone()
    optimizer = AdamW(params, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    assert optimizer.step(lambda: 3.0) == 3.0
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 5e-3
    assert torch.equal(params[1], kept)
    assert len(optimizer.state) == 1


def test_refuses_what_it_does_not_do() -> None:
    with pytest.raises(ConfigError, match="amsgrad"):
        AdamW(parameters(), amsgrad=True)
    with pytest.raises(ConfigError, match="betas"):
        AdamW(parameters(), betas=(0.9, 1.0))
    with pytest.raises(ConfigError, match="max_grad_norm"):
        AdamW(parameters(), max_grad_norm=0.0)
    tensors: list[Tensor] = [torch.zeros(2)]
    with pytest.raises(ShapeError, match="equally many"):
        adamw_(tensors, [], tensors, tensors, [torch.zeros(())], **HYPER)
    with pytest.raises(ShapeError, match="shape"):
        adamw_(tensors, [torch.zeros(3)], tensors, tensors, [torch.zeros(())], **HYPER)


def test_opcheck() -> None:
    def column() -> list[Tensor]:
        return [torch.rand(3, 2), torch.rand(5)]

    steps = [torch.tensor(0.0), torch.tensor(4.0)]
    args = (column(), column(), column(), column(), steps, *HYPER.values())
    torch.library.opcheck(
        torch.ops.hasten.adamw_.default, args, test_utils=("test_schema", "test_faketensor")
    )
