"""README's way through ``deepspeed.init_inference``, which refuses our block, on two ranks."""

from __future__ import annotations

import json

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from torch import nn

import ds_tilemoe
from ds_tilemoe.testing import RankContext, case, rank_tests


class Model(nn.Module):
    """One MoE layer: 4 experts, k = 2, nothing random."""

    def __init__(self) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        options = {"drop_tokens": False, "top2_2nd_expert_sampling": False}
        self.moe = MoE(16, expert, num_experts=4, ep_size=2, k=2, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(x)[0]


@case
def split_then_init_inference(ctx: RankContext) -> None:
    path = ctx.shared_dir / f"{ctx.rank}.json"
    path.write_text(json.dumps({"dtype": "fp32", "tile_overlap": {"num_consumer_ctas": 2}}))
    torch.manual_seed(0)
    model = Model()
    try:
        deepspeed.init_inference(model, config=json.loads(path.read_text()))
        raise AssertionError("init_inference took the block: README can say so now")
    except ValueError as error:
        assert "tile_overlap" in str(error)
    rest, block = ds_tilemoe.split_config(path)
    for module in model.modules():
        if isinstance(module, MoE):
            module.set_deepspeed_parallelism()
    engine = deepspeed.init_inference(model, config=rest)
    report = ds_tilemoe.apply(engine, block)
    assert report.swapped == ("moe.deepspeed_moe",), str(report)
    x = torch.randn(8, 16)
    with torch.no_grad():
        ours = engine(x)
        ds_tilemoe.restore(engine)
        torch.testing.assert_close(ours, engine(x), rtol=0, atol=1e-5)


test_ranks = rank_tests(__file__, world=2, timeout_s=300)
