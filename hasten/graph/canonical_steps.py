"""The steps of the canonical form: each looks at one node and says whether it changed the graph there."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hasten.graph.canonical_rotary import ROTARY_STEPS
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
)


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
# Their dims are counted in the result, which has more of them than the source.
_DIMS_OF_THE_RESULT = (
    aten.unsqueeze.default, aten.unsqueeze_.default, aten.stack.default, aten.diag_embed.default,
)  # fmt: skip


def _negative_dims(graph: fx.Graph, node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or is_call(node, *_DIMS_OF_THE_RESULT):
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
    if any(is_call(other, aten.as_strided.default) for other in graph.nodes):
        return False  # it counts in memory, whose order the swap would change
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
        or not isinstance(source, fx.Node)
        or not _is_fresh(source)
        or set(source.users) != {node}
    ):
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
    """Whether nothing else sees the storage of `node`: it is new, or all of something new in another order.

    An operator makes a new one if its schema returns no alias and it is no composite.
    """
    if not isinstance(node, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if is_call(node, aten.linear.default):  # a composite, but never a view
        return True
    if is_call(node, aten.transpose.int, aten.view.default, aten.permute.default):
        return set(node.args[0].users) == {node} and _is_fresh(node.args[0])  # type: ignore[union-attr]
    returned = node.target._schema.returns
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        node.target.name(), "CompositeImplicitAutograd"
    )
    return len(returned) == 1 and returned[0].alias_info is None and not composite


def _merge_views(graph: fx.Graph, node: fx.Node) -> bool:
    """view(view(x)) back to the shape of x -> x."""
    merging = (aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int)
    if not is_call(node, *merging) or not is_call(node.args[0], *merging):
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
    *ROTARY_STEPS,
    _linear,
    _linear_through_view,
    _linear_through_transpose,
    _out_of_place,
    _merge_views,
)
