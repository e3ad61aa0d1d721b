"""What launch/infer.py makes of its files: which dtype, and what DeepSpeed is left to see."""

from __future__ import annotations

import json
import sys

import pytest
from infer_runs import ROOT

from ds_tilemoe.errors import ConfigError

sys.path.insert(0, str(ROOT / "launch"))

from demo.model_config import unshared
from demo.settings import read_settings, take_dtype


@pytest.mark.parametrize(
    ("ds_config", "dtype"),
    [
        ({}, None),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bfloat16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, "fp16"),
        # DeepSpeed leaves a model as it is where a block is off, so that says nothing.
        ({"fp16": {"enabled": False}, "bf16": {}}, None),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, "bf16"),
        ({"data_types": {"param_dtype": "float16"}}, "fp16"),
        ({"data_types": {"param_dtype": "fp32", "grad_accum_dtype": "fp32"}}, "fp32"),
        ({"data_types": {"param_dtype": "bf16"}, "bf16": {"enabled": True}}, "bf16"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, None),
    ],
)
def test_dtype_of_a_ds_config(ds_config, dtype):
    assert take_dtype(ds_config) == dtype
    # DeepSpeed refuses MoE layers with these blocks and no optimizer.
    assert not {"bf16", "bfloat16", "fp16"} & ds_config.keys()
    assert "param_dtype" not in ds_config.get("data_types", {})


@pytest.mark.parametrize(
    ("ds_config", "words"),
    [
        ({"bf16": True}, "bf16: got true; wanted a block"),
        ({"fp16": {"enabled": "auto"}}, 'fp16: got {"enabled": "auto"}; wanted a block'),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16: got bf16 and"),
        (
            {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp32"}},
            "bf16 and data_types.param_dtype: got bf16 and fp32",
        ),
        ({"data_types": {"param_dtype": "int8"}}, 'data_types.param_dtype: got "int8"'),
        ({"data_types": {"param_dtype": 16}}, "data_types.param_dtype: got 16"),
    ],
)
def test_wrong_dtypes_of_a_ds_config(ds_config, words):
    with pytest.raises(ConfigError, match=words):
        take_dtype(ds_config)


def test_the_command_line_comes_first(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}, "tile_overlap": {"stats": True}}))
    assert read_settings(None, str(path), None).dtype == "bf16"
    settings = read_settings(None, str(path), "fp32")
    assert settings.dtype == "fp32"
    assert settings.block.stats
    assert settings.ds_config == {"train_micro_batch_size_per_gpu": 1}
    assert read_settings(None, None, None).dtype is None


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, None),
        (3, "ep_size 1 with 3 ranks and 8 experts: no row is exchanged"),
        (4, None),
        (6, "ep_size 2 with 6 ranks and 8 experts: rows are exchanged among 2 ranks each"),
        (8, None),
        (16, "ep_size 8 with 16 ranks"),
    ],
)
def test_a_job_whose_ranks_do_not_share_all_experts_says_so(ranks, words):
    said = unshared(ranks, 8)
    assert (words in said and "\n" not in said) if words else not said
