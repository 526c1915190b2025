"""The steps of the canonical form: each looks at one node and says whether it changed the graph there."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from hasten.graph.nodes import (
    aten,
    call,
    dtype_of,
    first_position,
    full_args,
    is_call,
    is_mutation,
    rank_of,
    replace,
    same_shape,
    same_size,
    shape_of,
    value,
)

_END = 2**63 - 1


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """`cat(-x2, x1)` for the halves of the last dim: half-split rotary (GPT-NeoX order)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rotate_pairs(x: torch.Tensor) -> torch.Tensor:
    """`(-x[2i+1], x[2i])` for the pairs of the last dim: interleaved rotary (GPT-J order)."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _drop_no_op(graph: fx.Graph, node: fx.Node) -> bool:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    source = node.args[0]
    if is_call(node, aten.dropout.default, aten.dropout_.default, aten.feature_dropout.default):
        _, p, training = full_args(node)
        idle = not training or p == 0
    elif is_call(node, aten.alias.default, aten.lift_fresh.default):
        idle = True
    elif is_call(node, aten.to.dtype):
        args = full_args(node)
        idle = dtype_of(source) == args[1] and not args[3]
    elif is_call(node, aten.view.default, aten.reshape.default, aten.expand.default, aten.slice.Tensor):
        idle = same_shape(node, source) and (not is_call(node, aten.slice.Tensor) or full_args(node)[4] == 1)
    elif is_call(node, aten.contiguous.default):
        # Where the source is contiguous already for every size the graph stands for.
        idle = is_call(source, aten.contiguous.default) or is_call(source, aten.linear.default)
    elif is_call(node, aten.transpose.int):
        return _drop_double_transpose(node, source)
    else:
        return False
    if idle:
        replace(node, source)
    return idle


def _drop_double_transpose(node: fx.Node, source: fx.Node) -> bool:
    if not is_call(source, aten.transpose.int):
        return False
    rank = rank_of(node)
    if {d % rank for d in node.args[1:]} != {d % rank for d in source.args[1:]}:  # type: ignore[operator]
        return False
    replace(node, source.args[0])  # type: ignore[arg-type]
    return True


def _unify_cast(graph: fx.Graph, node: fx.Node) -> bool:
    if is_call(node, aten.type_as.default):
        dtype = dtype_of(node)
    elif is_call(node, aten._to_copy.default, aten.to.dtype_layout, aten.to.device, aten.to.other):
        if {k for k, v in node.kwargs.items() if v is not None} - {
            "dtype",
            "layout",
            "device",
            "non_blocking",
            "pin_memory",
        }:
            return False
        dtype = dtype_of(node)
    else:
        return False
    with graph.inserting_before(node):
        replace(node, call(graph, aten.to.dtype, node.args[0], dtype))
    return True


_DIM_ARGUMENTS = {"dim", "dim0", "dim1"}


def _negative_dims(graph: fx.Graph, node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.target in (aten.unsqueeze.default, aten.stack.default):
        return False
    source = node.args[0] if node.args else None
    if isinstance(source, (list, tuple)):
        source = source[0] if source else None
    if not isinstance(source, fx.Node) or rank_of(source) == 0:
        return False
    rank, changed, args = rank_of(source), False, list(node.args)
    for position, argument in enumerate(schema.arguments[: len(args)]):
        given = args[position]
        if argument.name not in _DIM_ARGUMENTS:
            continue
        if isinstance(given, int) and given >= 0:
            args[position], changed = given - rank, True
        elif isinstance(given, (list, tuple)) and any(isinstance(d, int) and d >= 0 for d in given):
            args[position], changed = [d - rank if d >= 0 else d for d in given], True
    if changed:
        node.args = tuple(args)
    return changed


def _square(graph: fx.Graph, node: fx.Node) -> bool:
    is_product = is_call(node, aten.mul.Tensor) and node.args[0] is node.args[1]
    if not (is_product or is_call(node, aten.square.default)):
        return False
    with graph.inserting_before(node):
        replace(node, call(graph, aten.pow.Tensor_Scalar, node.args[0], 2))
    return True


def _rsqrt(graph: fx.Graph, node: fx.Node) -> bool:
    """`1/sqrt(v)`, `v**-0.5` -> `rsqrt(v)`; `y/sqrt(v)` -> `y*rsqrt(v)`."""
    if is_call(node, aten.reciprocal.default) and is_call(node.args[0], aten.sqrt.default):
        numerator, radicand = None, node.args[0].args[0]  # type: ignore[union-attr]
    elif is_call(node, aten.pow.Tensor_Scalar) and node.args[1] == -0.5:
        numerator, radicand = None, node.args[0]
    elif is_call(node, aten.div.Tensor) and is_call(node.args[1], aten.sqrt.default):
        numerator, radicand = node.args[0], node.args[1].args[0]  # type: ignore[union-attr]
    else:
        return False
    with graph.inserting_before(node):
        new = call(graph, aten.rsqrt.default, radicand)
        if isinstance(numerator, fx.Node):
            new = call(graph, aten.mul.Tensor, numerator, new)
        elif numerator not in (None, 1, 1.0):
            return False
        replace(node, new)
    return True


def _half(node: Any, source: fx.Node | None = None) -> tuple[fx.Node, int] | None:
    """(source, 0 or 1) if `node` is the first or second half of the last dim of `source`."""
    if is_call(node, operator.getitem):
        pieces = node.args[0]
        if is_call(
            pieces,
            aten.chunk.default,
            aten.split.Tensor,
            aten.split_with_sizes.default,
            aten.tensor_split.sections,
        ):
            sizes, last = value(pieces), full_args(pieces)[2]
            if len(sizes) == 2 and last == -1 and same_size(sizes[0].shape[-1], sizes[1].shape[-1]):
                return pieces.args[0], node.args[1]
        return None
    if not is_call(node, aten.slice.Tensor):
        return None
    origin, dim, start, end, step = full_args(node)
    width = shape_of(origin)[-1]
    if dim not in (-1, rank_of(origin) - 1) or step != 1 or not isinstance(width, int) or width % 2:
        return None
    start, end = start or 0, width if end is None or end >= width else end
    if (start, end) == (0, width // 2):
        return origin, 0
    if (start, end) == (width // 2, width):
        return origin, 1
    return None


def _rotate_half(graph: fx.Graph, node: fx.Node) -> bool:
    if (
        not is_call(node, aten.cat.default)
        or len(node.args[0]) != 2
        or full_args(node)[1] not in (-1, rank_of(node) - 1)
    ):  # type: ignore[arg-type]
        return False
    negated, first = node.args[0]  # type: ignore[misc]
    if not is_call(negated, aten.neg.default):
        return False
    low, high = _half(first), _half(negated.args[0])
    if low is None or high is None or low[0] is not high[0] or (low[1], high[1]) != (0, 1):
        return False
    with graph.inserting_before(node):
        replace(node, call(graph, rotate_half, low[0]))
    return True


def _stride_two(node: Any) -> tuple[fx.Node, int] | None:
    """(source, 0 or 1) if `node` is every second element of the last dim of `source`."""
    if is_call(node, aten.select.int):  # x.view(..., -1, 2)[..., i]
        origin, dim, index = node.args
        if (
            dim in (-1, rank_of(origin) - 1)
            and shape_of(origin)[-1] == 2
            and is_call(origin, aten.view.default, aten.reshape.default)
        ):
            base = origin.args[0]
            if rank_of(base) == rank_of(origin) - 1 and all(
                map(same_size, shape_of(base)[:-1], shape_of(origin)[:-2])
            ):
                return base, index
    if is_call(node, aten.slice.Tensor):
        origin, dim, start, end, step = full_args(node)
        if dim in (-1, rank_of(origin) - 1) and step == 2 and (end is None or end == _END):
            return origin, start or 0
    return None


def _rotate_pairs(graph: fx.Graph, node: fx.Node) -> bool:
    """`stack((-x_odd, x_even), -1)` then flattened back to the shape of x."""
    if not is_call(node, aten.view.default, aten.reshape.default, aten.flatten.using_ints):
        return False
    stack = node.args[0]
    if (
        not is_call(stack, aten.stack.default)
        or len(stack.args[0]) != 2
        or full_args(stack)[1] not in (-1, rank_of(stack) - 1)
    ):  # type: ignore[union-attr,arg-type]
        return False
    negated, even = stack.args[0]  # type: ignore[union-attr,misc]
    if not is_call(negated, aten.neg.default):
        return False
    low, high = _stride_two(even), _stride_two(negated.args[0])
    if (
        low is None
        or high is None
        or low[0] is not high[0]
        or (low[1], high[1]) != (0, 1)
        or not same_shape(low[0], node)
    ):
        return False
    with graph.inserting_before(node):
        replace(node, call(graph, rotate_pairs, low[0]))
    return True


def _transposed(node: Any) -> fx.Node | None:
    """W such that `node` is W^T for a 2-D W."""
    if isinstance(node, fx.Node) and rank_of(node) == 2:
        if is_call(node, aten.t.default, aten.numpy_T.default):
            return node.args[0]  # type: ignore[return-value]
        if is_call(node, aten.transpose.int, aten.permute.default):
            return node.args[0]  # type: ignore[return-value]
    return None


def _linear(graph: fx.Graph, node: fx.Node) -> bool:
    """`addmm(b, x, W)` and `matmul(x, W)` with a 2-D right-hand side that is a parameter or its transpose."""
    bias: Any = None
    if is_call(node, aten.addmm.default):
        bias, x, right, beta, alpha = full_args(node)
        if beta != 1 or alpha != 1 or rank_of(bias) != 1:
            return False
    elif is_call(node, aten.matmul.default, aten.mm.default):
        x, right = node.args
    else:
        return False
    if not isinstance(right, fx.Node) or rank_of(right) != 2 or rank_of(x) < 2:
        return False
    weight = _transposed(right)
    if not _is_parameter(weight if weight is not None else right):
        return False
    if weight is None:
        with graph.inserting_before(first_position(graph)):
            weight = call(graph, aten.t.default, right)
    with graph.inserting_before(node):
        replace(node, call(graph, aten.linear.default, x, weight, bias))
    return True


def _is_parameter(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _flattens_leading(view: Any) -> fx.Node | None:
    """The source if `view` only merges leading dims: [..., K] -> [N, K]."""
    if (
        not is_call(view, aten.view.default, aten.reshape.default, aten.flatten.using_ints)
        or rank_of(view) != 2
    ):
        return None
    source = view.args[0]
    if rank_of(source) <= 2 or not same_size(shape_of(source)[-1], shape_of(view)[-1]):
        return None
    return source


def _linear_through_view(graph: fx.Graph, node: fx.Node) -> bool:
    """linear(view(x, [-1, K])) -> view(linear(x), [-1, N]): the views then cancel with the ones behind."""
    if not is_call(node, aten.linear.default):
        return False
    source = _flattens_leading(node.args[0])
    if source is None:
        return False
    view = node.args[0]
    with graph.inserting_before(node):
        product = call(graph, aten.linear.default, source, *full_args(node)[1:])
        rows = view.args[1][0] if is_call(view, aten.view.default, aten.reshape.default) else -1  # type: ignore[union-attr,index]
        width = shape_of(product)[-1]
        replace(node, call(graph, aten.view.default, product, [rows, width]))
    return True


def _linear_through_transpose(graph: fx.Graph, node: fx.Node) -> bool:
    """linear(transpose(x)) of leading dims -> transpose(linear(x)), so that it stands behind its norm."""
    if not is_call(node, aten.linear.default) or not is_call(node.args[0], aten.transpose.int):
        return False
    source, *dims = node.args[0].args  # type: ignore[union-attr]
    rank = rank_of(node)
    if rank < 3 or rank - 1 in {d % rank for d in dims}:  # type: ignore[operator]
        return False
    with graph.inserting_before(node):
        product = call(graph, aten.linear.default, source, *full_args(node)[1:])
        replace(node, call(graph, aten.transpose.int, product, *dims))
    return True


def _out_of_place(graph: fx.Graph, node: fx.Node) -> bool:
    """`y = new(...); y.op_(...)` -> `op(new(...))` where nothing else can see the change."""
    if not is_mutation(node) or not isinstance(node.target, torch._ops.OpOverload) or not node.args:
        return False
    source, schema = node.args[0], node.target._schema
    written = [
        i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]
    packet = getattr(aten, schema.name.removeprefix("aten::").removesuffix("_"), None)
    pure = getattr(packet, node.target._overloadname, None) if schema.name.endswith("_") else None
    # A pointwise operator writes every element anyway; an indexed one would copy the rest.
    if (
        written != [0]
        or pure is None
        or torch.Tag.pointwise not in pure.tags
        or not _is_fresh(source)
        or set(source.users) != {node}
    ):  # type: ignore[union-attr]
        return False
    with graph.inserting_before(node):
        new = call(graph, pure, *node.args, **node.kwargs)
    if dtype_of(new) != dtype_of(node) or not same_shape(new, node):
        graph.erase_node(new)
        return False
    replace(node, new)
    graph.erase_node(node)
    return True


def _is_fresh(node: Any) -> bool:
    """Whether `node` has a storage of its own: its schema returns no alias and it is no composite."""
    if not isinstance(node, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    returned = node.target._schema.returns
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        node.target.name(), "CompositeImplicitAutograd"
    )
    return len(returned) == 1 and returned[0].alias_info is None and not composite


def _merge_views(graph: fx.Graph, node: fx.Node) -> bool:
    """view(view(x)) back to the shape of x -> x."""
    if not is_call(node, aten.view.default, aten.reshape.default) or not is_call(
        node.args[0], aten.view.default, aten.reshape.default
    ):
        return False
    origin = node.args[0].args[0]  # type: ignore[union-attr]
    if not same_shape(node, origin):  # type: ignore[arg-type]
        return False
    replace(node, origin)  # type: ignore[arg-type]
    return True


STEPS = (
    _unify_cast,
    _negative_dims,
    _drop_no_op,
    _square,
    _rsqrt,
    _rotate_half,
    _rotate_pairs,
    _linear,
    _linear_through_view,
    _linear_through_transpose,
    _out_of_place,
    _merge_views,
)
