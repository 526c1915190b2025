from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hasten.base.errors import ConfigError, InputError, ShapeError
from hasten.ops import native
from hasten.ops.cases import Case, check_backward, check_forward, select
from hasten.ops.cross_entropy import kernel, linear_cross_entropy
from hasten.ops.cross_entropy.cases import CASES

pytestmark = pytest.mark.usefixtures("body")

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
N, K, V = 63, 32, 1003


@pytest.fixture(params=["one chunk", "many chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small limits some rows make a chunk, fewer a block, and W's gradient is made in slices."""
    if request.param == "many chunks":
        monkeypatch.setattr(kernel, "CHUNK_BYTES", 20 * 101 * 4)
        monkeypatch.setattr(kernel, "BLOCK_BYTES", 7 * 101 * 4)
        monkeypatch.setattr(kernel, "SLICE_BYTES", 60 * 32 * 2)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(("case", "dtype"), select(CASES), ids=str)
def test_forward(case: Case, dtype: torch.dtype) -> None:
    check_forward(case, dtype)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(("case", "dtype"), select(CASES, backward=True), ids=str)
def test_backward(case: Case, dtype: torch.dtype) -> None:
    check_backward(case, dtype)


def _problem() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, bias = torch.randn(N, K, requires_grad=True), torch.randn(V, requires_grad=True)
    weight = (torch.randn(V, K) * K**-0.5).requires_grad_()
    labels = torch.randint(V, (N,))
    labels[::7] = -100
    return x, weight, bias, labels, torch.rand(N) + 0.5


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_torch(reduction: str, smoothing: float) -> None:
    x, weight, bias, labels, token_weight = _problem()
    logits = F.linear(x, weight, bias)
    options = {"label_smoothing": smoothing, "reduction": reduction}
    expected = F.cross_entropy(logits, labels, **options)
    loss = linear_cross_entropy(x, weight, labels, bias, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    got = torch.autograd.grad(loss, [x, weight, bias])
    for gradient, other in zip(got, torch.autograd.grad(expected, [x, weight, bias]), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-6 * other.abs().max().item())

    valid = labels != -100
    each = F.cross_entropy(F.linear(x, weight, bias), labels, label_smoothing=smoothing, reduction="none")
    expected = (each * token_weight).sum()
    expected = expected / token_weight[valid].sum() if reduction == "mean" else expected
    loss = linear_cross_entropy(x, weight, labels, bias, token_weight=token_weight, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    got = torch.autograd.grad(loss, [x, weight, bias])
    for gradient, other in zip(got, torch.autograd.grad(expected, [x, weight, bias]), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-6 * other.abs().max().item())


def test_the_operators_sums() -> None:
    x, weight, bias, labels, token_weight = _problem()
    constants = (-100, 0.0, 1e-2, 1.0, 0.0, False, False)
    loss_sum, weight_sum, z_sum, *gradients = torch.ops.hasten.linear_cross_entropy(
        x.detach(), weight.detach(), bias.detach(), labels, token_weight, *constants
    )
    valid = labels != -100
    torch.testing.assert_close(weight_sum, token_weight[valid].sum())
    lse = torch.logsumexp(F.linear(x, weight, bias), -1)
    torch.testing.assert_close(z_sum, (1e-2 * token_weight * lse.square())[valid].sum().detach())
    plain = linear_cross_entropy(x, weight, labels, bias, token_weight=token_weight, reduction="sum")
    torch.testing.assert_close(loss_sum, (plain + z_sum).detach())
    assert [gradient.numel() for gradient in gradients] == [0, 0, 0]


def test_all_ignored_is_nan_with_zero_gradients_as_in_torch() -> None:
    x, weight, bias, labels, _ = _problem()
    labels = torch.full_like(labels, -100)
    expected = F.cross_entropy(F.linear(x, weight, bias), labels)
    loss = linear_cross_entropy(x, weight, labels, bias)
    assert expected.isnan()
    assert loss.isnan()
    for gradient in torch.autograd.grad(loss, [x, weight, bias]):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    assert linear_cross_entropy(x, weight, labels, bias, reduction="sum") == 0


def test_labels_of_any_integer_dtype_and_any_shape() -> None:
    x, weight, _, labels, _ = _problem()
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, labels)
        assert torch.equal(linear_cross_entropy(x, weight, labels.int()), loss)
        assert torch.equal(linear_cross_entropy(x.view(9, 7, K), weight, labels.view(9, 7)), loss)


def test_ignored_rows_are_not_looked_at_and_others_keep_their_nan() -> None:
    x, weight, _, labels, _ = _problem()
    with torch.no_grad():
        spoilt = x.clone()
        spoilt[0] = float("nan")
        assert labels[0] == -100
        assert torch.equal(
            linear_cross_entropy(spoilt, weight, labels), linear_cross_entropy(x, weight, labels)
        )
        spoilt[1] = float("nan")
        assert linear_cross_entropy(spoilt, weight, labels).isnan()


class _Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_full_logits_never_exist(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width, vocabulary = 64, 8, 512
    monkeypatch.setattr(kernel, "CHUNK_BYTES", 16 * vocabulary * dtype.itemsize)
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(vocabulary, width)
    loss = kernel.Loss(label_smoothing=0.1, z_loss=1e-2, logit_scale=2.0, softcap=5.0)
    arguments = (None, torch.randint(vocabulary, (rows,)), None, -100, loss, True, True, dtype)
    # The mode sees inside the kernel's function; inside the operator it would not.
    with _Largest() as largest:
        loss_sum, *_ = kernel.linear_cross_entropy(x, weight, *arguments)
    assert loss_sum.isfinite()
    assert largest.numel == 16 * vocabulary
    with _Largest() as largest:
        F.cross_entropy(F.linear(x.float(), weight), arguments[1])
    assert largest.numel == rows * vocabulary


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_kept_graph_gives_the_same_gradient_again(scale: float) -> None:
    x, weight, bias, labels, _ = _problem()
    loss = linear_cross_entropy(x, weight, labels, bias) * scale
    loss.backward(retain_graph=True)
    first = [t.grad.clone() for t in (x, weight, bias)]
    for tensor in (x, weight, bias):
        tensor.grad.mul_(5)
        tensor.grad = None
    loss.backward()
    for tensor, gradient in zip((x, weight, bias), first, strict=True):
        assert torch.equal(tensor.grad, gradient)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_the_last_backward_hands_its_buffer_over() -> None:
    x, weight, _, labels, _ = _problem()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = linear_cross_entropy(x, weight, labels)
    (dweight,) = torch.autograd.grad(loss, weight)
    assert dweight.data_ptr() in [t.data_ptr() for t in saved]


def test_autocast_and_dtypes() -> None:
    x, weight, bias, labels, _ = _problem()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, labels, bias)
        expected = F.cross_entropy(F.linear(x, weight, bias).float(), labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    got = torch.autograd.grad(loss, [x, weight, bias])
    for gradient, other in zip(got, torch.autograd.grad(expected, [x, weight, bias]), strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, other, rtol=0.05, atol=0.01 * other.abs().max().item())
    with torch.autocast("cpu", torch.bfloat16):
        wide = linear_cross_entropy(x.double(), weight.double(), labels)
    assert wide.dtype == torch.float64


def test_small_weights_do_not_vanish_in_float16() -> None:
    x, weight, _, labels, _ = _problem()
    token_weight = torch.full((N,), 2.0**-24)
    options = {"reduction": "sum", "token_weight": token_weight}
    expected = torch.autograd.grad(linear_cross_entropy(x, weight, labels, **options), weight)[0]
    got = torch.autograd.grad(linear_cross_entropy(x.half(), weight, labels, **options), weight)[0]
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.01 * expected.abs().max().item())


def test_the_same_input_gives_the_same_bits() -> None:
    x, weight, bias, labels, token_weight = _problem()
    runs = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(x, weight, labels, bias, token_weight=token_weight)
        runs.append([loss, *torch.autograd.grad(loss, [x, weight, bias])])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def _rows(z: Tensor, **constants: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient and its column sums of rows of logits, by the body that is on."""
    rows, vocabulary = z.shape
    loss = kernel.Loss(*(constants.get(k, d) for k, d in _CONSTANTS.items()))
    sums = kernel._Sums(torch.empty(rows), torch.empty(rows), torch.zeros(vocabulary), None)
    labels = torch.arange(rows) * 7 % vocabulary
    fill = kernel._torch_rows if native.refusal(z) else kernel._native_rows
    block = None if z.dtype == torch.float32 else torch.empty(rows, vocabulary)
    gradient = z.clone()
    fill(gradient, labels, torch.ones(rows), 1.0, loss, True, sums, kernel._Buffers(gradient, block), 0)
    assert sums.dbias is not None
    return sums.loss, gradient, sums.dbias


_CONSTANTS = {"label_smoothing": 0.0, "z_loss": 0.0, "logit_scale": 1.0, "softcap": 0.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 3, 17, 511, 2048 + 13, 5000])
def test_rows_of_any_length(vocabulary: int, dtype: torch.dtype) -> None:
    z = (torch.randn(5, vocabulary) * 3).to(dtype)
    exact = z.double().requires_grad_()
    labels = torch.arange(5) * 7 % vocabulary
    expected = F.cross_entropy(exact, labels, reduction="none", label_smoothing=0.1)
    (wanted,) = torch.autograd.grad(expected.sum(), exact)
    loss, gradient, dbias = _rows(z, label_smoothing=0.1)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(gradient.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
    torch.testing.assert_close(dbias.double(), wanted.sum(0), rtol=0, atol=5 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_infinite_logits_are_as_in_torch(softcap: float) -> None:
    inf, nan = float("inf"), float("nan")
    z = torch.randn(6, 4500)
    z[0, 100:2500] = -inf  # a whole block
    z[1, 5] = inf
    z[2, 4400] = nan
    z[3] = -inf
    z[4, 2048:4096] = nan
    z[5, :2048], z[5, 3] = -inf, nan
    got = _rows(z, softcap=softcap)
    with native.switched_off():
        expected = _rows(z, softcap=softcap)
    for value, other in zip(got, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_large_logits_neither_overflow_nor_vanish() -> None:
    z = torch.randn(4, 3000) * 1e4
    expected = F.cross_entropy(z.double(), torch.arange(4) * 7, reduction="none")
    loss, gradient, _ = _rows(z)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    assert gradient.isfinite().all()


def test_threads_do_not_change_a_bit() -> None:
    z = torch.randn(40, 5000).bfloat16()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(_rows(z, label_smoothing=0.1, softcap=9.0))
    if not native.refusal(z):
        assert all(torch.equal(a, b) for r in results[1:] for a, b in zip(r, results[0], strict=True))


def test_labels_and_weights_with_strides() -> None:
    x, weight, _, labels, _ = _problem()
    wide_labels, wide_weight = torch.stack([labels, labels], 1)[:, 0], torch.rand(1).expand(N)
    with torch.no_grad():
        got = linear_cross_entropy(x, weight, wide_labels, token_weight=wide_weight)
        assert torch.equal(got, linear_cross_entropy(x, weight, labels, token_weight=wide_weight.clone()))


def test_gradients_are_made_only_where_needed() -> None:
    x, weight, _, labels, _ = _problem()
    frozen = linear_cross_entropy(x, weight.detach(), labels)
    (dx,) = torch.autograd.grad(frozen, x)
    assert torch.equal(dx, torch.autograd.grad(linear_cross_entropy(x, weight, labels), x)[0])
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, labels).requires_grad
    constants = (-100, 0.0, 0.0, 1.0, 0.0)
    loss, *_ = torch.ops.hasten.linear_cross_entropy(x, weight, None, labels, None, *constants, True, False)
    with pytest.raises(RuntimeError, match="need_weight was False"):
        loss.backward()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(linear_cross_entropy(x, weight, labels), x, create_graph=True)


def test_operator_declares_what_it_does() -> None:
    x, weight, bias, labels, token_weight = _problem()
    constants = (-100, 0.1, 1e-2, 2.0, 3.0)
    operator = torch.ops.hasten.linear_cross_entropy
    for compute in [None, torch.bfloat16]:
        arguments = (x, weight, bias, labels, token_weight, *constants, True, True, compute)
        torch.library.opcheck(operator, arguments, test_utils=CHECKS)
    arguments = (x.detach(), weight.detach(), None, labels, None, *constants, False, False)
    torch.library.opcheck(operator, arguments, test_utils=CHECKS[:3])


def test_mistakes_are_refused() -> None:
    x, weight, _, labels, _ = _problem()
    with pytest.raises(InputError, match=rf"label {V} is out of range; allowed: 0 to {V - 1}, or -100"):
        linear_cross_entropy(x, weight, torch.full_like(labels, V))
    with pytest.raises(InputError, match="label -1 is out of range"):
        linear_cross_entropy(x, weight, torch.full_like(labels, -1))
    with pytest.raises(ConfigError, match="did you mean 'mean'"):
        linear_cross_entropy(x, weight, labels, reduction="men")
    with pytest.raises(ShapeError, match=rf"labels is \[{N - 1}\]; needs \[{N}\]"):
        linear_cross_entropy(x, weight, labels[1:])
    with pytest.raises(ShapeError, match="token_weight is"):
        linear_cross_entropy(x, weight, labels, token_weight=torch.ones(1))
