"""OpenVINO as a contender of inference."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from hasten.base.errors import HastenError
from hasten.models import tiny_model

pytestmark = pytest.mark.skipif(find_spec("openvino") is None, reason="openvino is not installed")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_its_hidden_states_are_those_of_the_model(family: str):
    from hasten.bench.openvino_model import openvino_forward

    model = tiny_model(family).eval().base_model
    settings = {} if family == "bert" else {"use_cache": False}
    ids = torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    got = openvino_forward(model, settings, (2, 24), bf16=False)(input_ids=ids).last_hidden_state
    with torch.no_grad():
        expected = model(input_ids=ids, **settings).last_hidden_state
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_it_cannot_follow_is_one_message():
    from hasten.bench.openvino_model import openvino_forward

    class Odd(torch.nn.Module):
        def forward(self, input_ids):
            raise RuntimeError("odd")

    with pytest.raises(HastenError, match="OpenVINO cannot convert this model"):
        openvino_forward(Odd(), {}, (1, 4), bf16=False)
