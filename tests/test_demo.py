"""The demo model: its checkpoint at every ep_size, its KV cache, its texts, and that it wins."""

from __future__ import annotations

import functools
import io
import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from ds_tilemoe.testing import RankContext, case, free_port, init_deepspeed, rank_tests

LAUNCH = Path(__file__).parent.parent / "launch"
DEMO = LAUNCH / "demo"
sys.path.insert(0, str(LAUNCH))

from full_disk import room  # noqa: E402

import train_demo  # noqa: E402
from demo import checkpoint, options  # noqa: E402
from demo.corpus import digest, training_text  # noqa: E402
from demo.generation import perplexity, read_and_write  # noqa: E402
from demo.model import ByteMoE, KVCache  # noqa: E402
from demo.model_config import ModelConfig, ModelConfigError  # noqa: E402
from demo.outputs import OutputError  # noqa: E402
from demo.trigram import Trigram  # noqa: E402

SIZES = ModelConfig.load(DEMO / "config.json")
HELDOUT = (DEMO / "heldout.txt").read_bytes()


def engine_of(ep_size: int, *, trained: bool = True) -> torch.nn.Module:
    import deepspeed

    init_deepspeed()
    model = ByteMoE(SIZES, ep_size)
    engine, *_ = deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})
    if trained:
        checkpoint.load(model, DEMO / "model.safetensors")
    else:
        checkpoint.randomise(model, seed=3)
    engine.eval()
    return engine


@pytest.fixture(scope="module")
def engine():
    with pytest.MonkeyPatch.context() as patch:
        ports = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **ports}.items():
            patch.setenv(name, value)
        return engine_of(1)


@functools.cache
def corpus() -> bytes:
    return training_text()


@case(ep_size=[2, 4])
def one_file_serves_every_ep_size(ctx: RankContext, ep_size: int) -> None:
    tokens = torch.frombuffer(bytearray(HELDOUT[ctx.rank * 100 :][:300]), dtype=torch.uint8)
    for trained in (True, False):
        wanted, got = (
            read_and_write(engine_of(size, trained=trained), SIZES, bytes(tokens.tolist()), 5)
            for size in (1, ep_size)
        )
        assert (wanted.logits - got.logits).abs().max() <= 1e-5
        assert wanted.written == got.written


test_ranks = rank_tests(__file__, world=4, timeout_s=300)


def test_files_are_small_and_ascii():
    assert (DEMO / "model.safetensors").stat().st_size <= 4_000_000
    for name in ("text.txt", "heldout.txt"):
        assert 2_000 <= len((DEMO / name).read_text(encoding="ascii")) <= 10_000


def test_training_text_has_no_line_of_the_heldout_text():
    lines = [line for line in HELDOUT.split(b"\n") if len(line) > 40]
    assert len(lines) > 50
    assert not [line for line in lines if line.strip() in corpus()]


def test_model_beats_the_trigram_model(engine):
    record = checkpoint.metadata(DEMO / "model.safetensors")
    ours, trigram = perplexity(engine, HELDOUT), Trigram(corpus()).perplexity(HELDOUT)
    assert ours == pytest.approx(float(record["heldout_perplexity"]), rel=1e-3)
    # Another Python has other docstrings, and so a slightly different trigram model.
    same_text = record["training_text"] == digest(corpus())
    recorded = float(record["trigram_perplexity"])
    assert trigram == pytest.approx(recorded, rel=1e-4 if same_text else 0.05)
    assert ours < trigram


def test_trigram_probabilities():
    model = Trigram(b"abababac" * 50)
    assert model._probability.sum(axis=-1) == pytest.approx(1.0)
    assert (model._probability > 0).all()
    assert model.perplexity(b"abababab") < 2 < 100 < model.perplexity(b"zqzqzqzq")


@pytest.mark.parametrize("chunk", [1, 7, 256, 300])
def test_kv_cache_equals_the_full_forward(engine, chunk):
    length = 2 * SIZES.window + 90  # so that the window moves
    tokens = torch.frombuffer(bytearray(HELDOUT[:length]), dtype=torch.uint8).long()[None]
    with torch.no_grad():
        full, _ = engine(tokens)
        cache = KVCache(SIZES, 1, length, full)
        pieces = [engine(piece, cache=cache)[0] for piece in tokens.split(chunk, dim=1)]
    assert cache.length == length
    # Other row counts make other roundings in every GEMM, so the error goes with the logits' size.
    assert (torch.cat(pieces, dim=1) - full).abs().max() <= 1e-5 * full.abs().max()


def test_full_cache_is_an_error(engine):
    cache = KVCache(SIZES, 1, 4, torch.empty(0))
    with pytest.raises(ValueError, match="5 tokens; there is room for 4"):
        engine(torch.zeros(1, 5, dtype=torch.long), cache=cache)


def test_greedy_text_is_that_of_repeated_full_forwards(engine):
    text = HELDOUT[:200]
    reading = read_and_write(engine, SIZES, text, 6)
    for _ in range(6):
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[None]
        with torch.no_grad():
            text += bytes([int(engine(tokens)[0][0, -1].argmax())])
    assert reading.written == text[200:]
    assert reading.steps == 5
    assert len(reading.logits) == 205
    assert read_and_write(engine, SIZES, text, 0).written == b""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hiden": 64}, "got the unknown key 'hiden'; wanted one of .*; fix: write 'hidden'"),
        ({"heads": 3}, "hidden: got 128; wanted a multiple of 2 \\* heads, 6; fix: "),
        ({"topk": 9}, "topk: got 9; wanted at most num_experts, 8; fix: "),
        ({"layers": 0}, "layers: got 0; wanted a whole number from 1 to 2147483647; fix: "),
        ({"layers": 2**31}, "layers: got 2147483648; wanted a whole number from 1 to"),
        ({"layers": 1.5}, "layers: got 1.5; wanted a whole number"),
        ({"layers": True}, "layers: got True; wanted a whole number"),
        ({"window": None}, "window: got None; wanted a whole number"),
        ({"rope_base": float("nan")}, "rope_base: got nan; wanted a number from 1 to"),
        ({"rope_base": float("inf")}, "rope_base: got inf; wanted a number from 1 to"),
    ],
)
def test_wrong_model_config(tmp_path, change, message):
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps(asdict(SIZES) | change))
    with pytest.raises(ModelConfigError, match=message) as caught:
        ModelConfig.load(path)
    assert str(path) in str(caught.value)


def test_model_config_that_cannot_be_read(tmp_path):
    with pytest.raises(ModelConfigError, match="No such file"):
        ModelConfig.load(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ModelConfigError, match="got a list; wanted a JSON object"):
        ModelConfig.load(tmp_path / "list.json")
    with pytest.raises(ModelConfigError, match="Is a directory"):
        ModelConfig.load(tmp_path)
    (tmp_path / "long.json").write_text(
        json.dumps(asdict(SIZES) | {"hidden": "x"}).replace('"x"', "1" * 5000)
    )
    with pytest.raises(
        ModelConfigError, match=r"long.json': hidden: got inf; wanted a whole number"
    ):
        ModelConfig.load(tmp_path / "long.json")
    (tmp_path / "few.json").write_text('{"hidden": 8}')
    with pytest.raises(ModelConfigError, match=r"got no ffn, heads, .*; wanted all sizes"):
        ModelConfig.load(tmp_path / "few.json")
    for odd in (b'{"hidden": \xff}', b"{", b"[" * 100_000):
        (tmp_path / "odd.json").write_bytes(odd)
        with pytest.raises(ModelConfigError, match="got what is not JSON"):
            ModelConfig.load(tmp_path / "odd.json")


def test_checkpoint_of_another_shape_is_refused(engine, tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "small.safetensors"
    name = "embedding.weight"
    save_file({name: torch.zeros(256, 8)}, path)
    with pytest.raises(ValueError, match=r"embedding.weight of \[256, 8\].* \[256, 128\]"):
        checkpoint.load(engine.module, path)


@pytest.mark.parametrize("kept", [0, 5, 1000, -100])
def test_a_checkpoint_that_is_cut_off_is_refused(engine, tmp_path, kept):
    path = tmp_path / "cut.safetensors"
    path.write_bytes((DEMO / "model.safetensors").read_bytes()[:kept])
    words = f"checkpoint {path}: got what cannot be read .*; wanted a whole safetensors file; fix: "
    with pytest.raises(options.InputError, match=words):
        checkpoint.load(engine.module, path)


def test_a_checkpoint_is_written_whole_or_not_at_all(engine, tmp_path):
    path = tmp_path / "model.safetensors"
    with (
        room(100_000),
        pytest.raises(OutputError, match=r"^--out: got '.*model.safetensors' .*; f"),
    ):
        checkpoint.save(engine.module, path, {})
    assert list(tmp_path.iterdir()) == []
    checkpoint.save(engine.module, path, {"a": "b"})
    assert checkpoint.metadata(path)["a"] == "b"
    assert list(tmp_path.iterdir()) == [path]


def test_training_that_loses_writes_nothing(tmp_path):
    out = tmp_path / "model.safetensors"
    command = [sys.executable, LAUNCH / "train_demo.py", "--steps", "1", "--batch", "2"]
    done = subprocess.run(
        [*map(str, command), "--out", str(out)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    assert "byte perplexity of the held-out text: trigram" in done.stdout
    assert "nothing written" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("perplexity_", [math.nan, math.inf])
def test_a_model_that_diverged_is_not_written(engine, tmp_path, monkeypatch, perplexity_):
    monkeypatch.setattr("demo.generation.perplexity", lambda engine, text: perplexity_)
    said = io.StringIO()
    monkeypatch.setattr(sys, "__stdout__", said)
    assert train_demo.judge(engine, b"abababac" * 50, tmp_path / "model.safetensors") is True
    assert "the model does not win: nothing written" in said.getvalue()
    assert list(tmp_path.iterdir()) == []


def test_training_with_stdout_closed(tmp_path):
    line = [sys.executable, LAUNCH / "train_demo.py", "--steps", "1", "--batch", "1"]
    line += ["--out", tmp_path / "model.safetensors"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *map(str, line)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert "train_demo.py: error: stdout: got Bad file descriptor; wanted a place" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--steps", "0"], "--steps: got '0'; wanted an integer from 1 to"),
        (["--lr", "nan"], "--lr: got 'nan'; wanted a finite number above 0"),
        (["--batch", "3"], "--batch: got 3; wanted a multiple of the 2 ranks; fix: --batch 4"),
        (["--out", "x.pt"], "--out: got 'x.pt'; wanted a name that ends in .safetensors; fix: "),
        (["--step", "5"], "--step: got no option of this name; wanted one that there is; fix: "),
    ],
)
def test_wrong_arguments_of_the_training(monkeypatch, capsys, flags, words):
    """They are the same on every rank; rank 0 speaks, before torch is imported."""

    def leave(message):
        raise SystemExit(message)

    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(options, "leave", leave)
    monkeypatch.setattr(sys, "argv", ["train_demo.py", *flags])
    with pytest.raises(SystemExit) as ended:
        train_demo.arguments()
    assert str(ended.value).startswith(words)
    assert "usage: train_demo.py" in capsys.readouterr().err
