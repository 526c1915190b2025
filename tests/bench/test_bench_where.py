"""Where the time of a step goes: products, hasten's operators, the optimizer and the rest."""

from __future__ import annotations

import pytest
import torch

import hasten
from hasten.bench import where
from hasten.models import tiny_model


def test_products_and_the_optimizer_stand_alone() -> None:
    layer = torch.nn.Linear(32, 48)
    optimizer = torch.optim.AdamW(layer.parameters())
    x = torch.randn(64, 32)

    def step() -> None:
        torch.tanh(layer(x)).sum().backward()
        optimizer.step()

    step()
    rows = {row.operator: row for row in where.time_by_operator(step)}
    # The forward product, and the gradient of the weight: the input needs none.
    assert rows[where.PRODUCTS].flops == 2 * 2 * 64 * 32 * 48
    assert rows[where.PRODUCTS].calls == 2
    assert rows[where.OPTIMIZER].time_s > 0
    assert sum(row.share for row in rows.values()) == pytest.approx(1)
    times = [row.time_s for row in rows.values()]
    assert times == sorted(times, reverse=True)


def test_what_an_operator_calls_is_its_own() -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    hasten.optimize(model)
    ids = torch.randint(0, 90, (2, 64))

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    step()
    rows = {row.operator: row for row in where.time_by_operator(step, attention_flops=7.0)}
    hasten.restore(model)
    assert rows["attention"].calls == rows["attention backward"].calls == 3
    assert (rows["attention"].flops, rows["attention backward"].flops) == (7.0, 14.0)
    assert rows[where.PRODUCTS].flops > 0
    assert where.OPTIMIZER not in rows


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("aten::mm", [[3, 5], [5, 7]], 2 * 3 * 5 * 7),
        ("aten::mm", [[3, 5], [5, 7], [3, 7]], 2 * 3 * 5 * 7),
        ("aten::addmm_", [[3, 7], [3, 5], [5, 7], [], []], 2 * 3 * 5 * 7),
        ("aten::bmm", [[2, 3, 5], [2, 5, 7]], 2 * 2 * 3 * 5 * 7),
        ("aten::baddbmm", [[2, 3, 7], [2, 3, 5], [2, 5, 7], [], []], 2 * 2 * 3 * 5 * 7),
        ("aten::add", [[3, 5], [3, 5]], 0),
    ],
)
def test_operations_of_a_product(name: str, shapes: list[list[int]], flops: float) -> None:
    assert where._product_flops(name, shapes) == flops
