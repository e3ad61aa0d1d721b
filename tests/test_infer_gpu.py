"""launch/infer.py on the GPUs of this machine, as users start it: bf16, --compare, a trace."""

from __future__ import annotations

import json
from typing import Any

import pytest
from infer_runs import ROOT, launch, record_in

# The first run compiles the op, unless something has done so before.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
LIMIT_S = 600.0
TEXT = ROOT / "launch" / "demo" / "text.txt"


def all_gpus() -> int:
    """As many ranks as there are GPUs and as divide the demo's experts."""
    import torch

    return max(ranks for ranks in (1, 2, 4, 8) if ranks <= torch.cuda.device_count())


def run(*args: object, ranks: int) -> dict[str, Any]:
    done = launch(*args, "--compare", "--json", ranks=ranks, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    record = record_in(done.stdout)
    assert record["ranks"] == ranks
    assert record["backend"] == "cuda"
    assert [entry["status"] for entry in record["swap"]] == ["swapped"] * len(record["swap"])
    assert record["fault"] is None
    assert record["max_abs_diff"] <= record["max_abs_diff_limit"]
    assert record["layer_diff"] <= 2e-2
    return record


def test_the_demo_in_bf16(tmp_path):
    ranks, trace = all_gpus(), tmp_path / "trace.json"
    record = run("--trace", trace, ranks=ranks)
    chunks = -(-(len(TEXT.read_bytes()) // ranks) // 1024)
    assert record["dtype"] == "bf16"
    assert record["weights"] == "trained"
    assert record["perplexity"] == pytest.approx(record["perplexity_unswapped"], rel=0.02)
    for layer in record["layers"]:
        assert layer["calls"] == chunks + 127  # the first byte comes with the text
        assert layer["time_us"] > 0
        assert layer["gemm2_us"] > 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(ranks))
    assert {layer["name"] for layer in record["layers"]} <= {event["name"] for event in events}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_another_model_with_random_weights(tmp_path, dtype):
    sizes = {"hidden": 1024, "ffn": 512, "layers": 3, "heads": 8, "num_experts": 32, "topk": 4}
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps(sizes | {"window": 128, "max_positions": 4096}))
    record = run(
        *("--model-config", path, "--dtype", dtype, "--max-new-tokens", 16), ranks=all_gpus()
    )
    assert record["dtype"] == dtype
    assert len(record["layers"]) == 3
    assert record["decode_tokens_per_s"] > 0


def test_fp32_keeps_deepspeeds_path_and_says_so():
    done = launch("--dtype", "fp32", "--compare", "--max-new-tokens", 2, ranks=1, timeout_s=LIMIT_S)
    assert done.returncode == 1, done.stderr[-4000:]
    assert "only bfloat16 and float16 are supported" in done.stderr
    assert "no layer was swapped" in done.stderr
