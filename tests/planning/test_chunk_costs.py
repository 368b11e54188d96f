"""The cost by which microbatches are formed: what the user gives, or what follows from the model's sizes."""

import pytest

from jaxserve import ConfigError, EngineConfig
from jaxserve.planning.chunk_costs import assumed_chunk_cost, given_chunk_cost
from jaxserve.scheduler.chunk_cost import ChunkCost
from jaxserve.sim.cluster import model_config
from jaxserve.sim.shape import ModelShape


def test_the_cost_that_the_user_gives_is_parsed() -> None:
    assert given_chunk_cost(EngineConfig()) is None
    assert given_chunk_cost(EngineConfig(microbatch_cost="1e-9, 2e-5,4e-3")) == ChunkCost(1e-9, 2e-5, 4e-3)


@pytest.mark.parametrize("text", ["", "1,2", "1,2,3,4", "a,b,c", "1e-9,0,1e-3", "-1,1,1", "1,inf,1", "nan,1,1"])
def test_other_text_is_refused_with_its_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"microbatch_cost is .*: it must be three numbers a,b,g"):
        given_chunk_cost(EngineConfig(microbatch_cost=text))


@pytest.mark.parametrize("name", ["qwen2.5-14b", "llama-3-8b"])
def test_the_assumed_cost_has_the_ratio_of_the_operations_in_attention_and_in_products(name: str) -> None:
    shape = ModelShape.load(name)
    cost = assumed_chunk_cost(model_config(shape), "gpu")
    assert cost.a / cost.b == pytest.approx(shape.attention_ops() / shape.layer_ops(), rel=0.01)
    assert cost.g / cost.b == 256
