"""The tile_overlap block: what is accepted, and that everything else is refused by name."""

from __future__ import annotations

import base64
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_tilemoe import config as config_module
from ds_tilemoe.config import DS_CONFIG_KEYS, TileOverlapConfig, load_config, split_config
from ds_tilemoe.config_block import check_cpu_config, without_unused
from ds_tilemoe.errors import ConfigError

DS_CONFIGS = Path(__file__).parent.parent / "ds_configs"
BATCH = {"train_micro_batch_size_per_gpu": 1}

INTEGER_KEYS = {
    "tile_m": "auto",
    "tile_n": "auto",
    "num_consumer_ctas": "auto",
    "min_consumer_ctas": 1,
    "max_consumer_ctas": "auto",
    "num_dispatch_ctas": "auto",
    "bands_per_segment": "auto",
    "local_tail_waves": "auto",
    "max_tokens_per_rank": "auto",
}
DEFAULTS = {
    "enabled": True,
    "backend": "auto",
    "layout": "auto",
    **INTEGER_KEYS,
    "mover": "auto",
    "dispatch": "auto",
    "router": "auto",
    "router_logits": "auto",
    "transport": "auto",
    "adaptive": {"enabled": True, "interval": 1, "hysteresis": 0.02, "cache_dir": None},
    "layers": ".*",
    "strict": False,
    "wait_timeout_s": 60.0,
    "stats": False,
}


def refusal(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return str(caught.value)


@pytest.fixture(autouse=True)
def _log_again() -> None:
    config_module._log_once.cache_clear()


def test_option_list_is_frozen() -> None:
    """A new field or default has to be written here, in README and in CHANGELOG too."""
    assert TileOverlapConfig().model_dump() == DEFAULTS


def test_every_default_passes_when_written_out() -> None:
    assert load_config(DEFAULTS) == TileOverlapConfig()
    assert load_config({"tile_overlap": DEFAULTS, **BATCH}) == TileOverlapConfig()


@pytest.mark.parametrize("key", INTEGER_KEYS)
@pytest.mark.parametrize("value", ["8", -1, 0, 1.5, None, "auto", True, 2**40])
def test_integer_keys_take_integers_only(key: str, value: object) -> None:
    allowed = (value == "auto" and INTEGER_KEYS[key] == "auto") or (
        key == "local_tail_waves" and value == 0 and value is not False
    )
    for source in ({key: value}, {"tile_overlap": {key: value}, **BATCH}):
        if allowed:
            assert getattr(load_config(source), key) == value
        else:
            message = refusal(source)
            assert f"tile_overlap.{key}: got {json.dumps(value)}; wanted " in message
            assert "fix: " in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enabled", 1),
        ("enabled", "true"),
        ("strict", None),
        ("stats", 0),
        ("layout", "padded"),
        ("layout", True),
        ("mover", "SM"),
        ("layers", "("),
        ("layers", 3),
        ("layers", None),
        ("wait_timeout_s", 0),
        ("wait_timeout_s", -1.0),
        ("wait_timeout_s", True),
        ("wait_timeout_s", "60"),
        ("wait_timeout_s", 1_000_001),
        ("wait_timeout_s", 1e10),
        ("wait_timeout_s", float("inf")),
        ("wait_timeout_s", float("nan")),
        ("adaptive", 3),
        ("adaptive", None),
        ("num_consumer_ctas", 256),
        ("backend", "gpu"),
        ("tile_m", 4097),
    ],
)
def test_other_keys_are_strict(key: str, value: object) -> None:
    message = refusal({key: value})
    assert message.startswith(f"tile_overlap.{key}: got ")
    assert "; wanted " in message
    assert "; fix: " in message


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"max_tokens_per_rank": 2**31}, '"auto" or an integer from 1 to 2147483647; fix: leave'),
        ({"bands_per_segment": 2**31}, '"auto" or an integer from 1 to 2147483647; fix: leave'),
        ({"local_tail_waves": 2**31}, '"auto", "all" or an integer from 0 to 2147483647; fix: l'),
        ({"adaptive": {"interval": 1e30}}, "an integer from 1 to 2147483647; fix: leave it out"),
        ({"adaptive": {"interval": 3.0}}, "an integer from 1 to 2147483647; fix: write 3"),
        ({"tile_m": 5000.0}, "an integer from 1 to 4096; fix: leave it out"),
        ({"tile_m": 0.0}, "an integer from 1 to 4096; fix: leave it out"),
        ({"tile_m": 16.0}, "an integer from 1 to 4096; fix: write 16"),
        ({"wait_timeout_s": 1e-300}, "a number of seconds from 0.001 to 1000000; fix: leave"),
        ({"wait_timeout_s": 1e300}, "a number of seconds from 0.001 to 1000000; fix: leave"),
    ],
)
def test_both_bounds_are_told_and_a_fix_is_within_them(block: Any, told: str) -> None:
    assert told in refusal(block)


def test_values_that_pass() -> None:
    block = {
        "backend": "cpu",
        "layout": "aligned",
        "tile_m": 16,
        "tile_n": 32,
        "num_consumer_ctas": 4,
        "min_consumer_ctas": 2,
        "max_consumer_ctas": 8,
        "bands_per_segment": 3,
        "local_tail_waves": 0,
        "mover": "sm",
        "router": "deepspeed",
        "router_logits": "deepspeed",
        "max_tokens_per_rank": 100_000,
        "layers": r"model\.layers\.[0-3]\..*",
        "wait_timeout_s": 5,
    }
    loaded = load_config(block)
    assert {key: getattr(loaded, key) for key in block} == block
    assert load_config({"local_tail_waves": "all"}).local_tail_waves == "all"
    assert load_config({"wait_timeout_s": 1e6}).wait_timeout_s == 1_000_000
    assert load_config({"wait_timeout_s": 0.001}).wait_timeout_s == 0.001
    assert load_config({"max_tokens_per_rank": 2**31 - 1}).max_tokens_per_rank == 2**31 - 1
    with pytest.raises(ValueError, match="frozen"):
        loaded.tile_m = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("num_consumer_cta", "num_consumer_ctas"),
        ("bands_per_segement", "bands_per_segment"),
        ("Layout", "layout"),
        ("timeout", "wait_timeout_s"),
        ("tile_overlap", "tile_m"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(key: str, near: str) -> None:
    message = refusal({"tile_overlap": {key: 1}})
    assert message.startswith(f"tile_overlap.{key}: got an unknown key; ")
    if key != "tile_overlap":
        assert repr(near) in message


def test_unknown_key_alone_is_not_taken_for_a_ds_config() -> None:
    assert "num_consumer_ctas" in refusal({"num_consumer_cta": 8})


def test_all_faults_are_told_at_once() -> None:
    message = refusal({"tile_n": -1, "tile_nn": 1, "adaptive": {"intervl": 2}, "strict": 1})
    assert [line.split(":")[0] for line in message.splitlines()] == [
        "tile_overlap.tile_n",
        "tile_overlap.adaptive.intervl",
        "tile_overlap.strict",
        "tile_overlap.tile_nn",
    ]
    assert "'interval'" in message


def test_movers() -> None:
    assert load_config({"mover": "copy_engine"}).mover == "copy_engine"
    for spelt in ("copy-engine", "COPY_ENGINE"):
        assert 'fix: write "copy_engine"' in refusal({"mover": spelt})
    message = refusal({"mover": "copy_engine", "transport": "nvshmem"})
    assert 'mover: got "copy_engine"; wanted "auto", "sm" or "none" with transport' in message
    assert 'fix: let transport be "auto"' in message
    message = refusal({"mover": "copy_engine", "backend": "cpu"})
    assert 'wanted "auto" or "sm" or "none"; fix: leave mover out: the CPU' in message
    with pytest.raises(ConfigError, match="leave mover out"):
        check_cpu_config(load_config({"mover": "copy_engine"}))
    assert 'fix: write "sm"' in refusal({"mover": "SM"})
    assert load_config({"mover": DEFAULTS["mover"]}) == TileOverlapConfig()


@pytest.mark.parametrize(
    ("name", "value", "other", "got", "default"),
    [
        ("mover", "none", "num_consumer_ctas", 4, '"auto"'),
        ("mover", "none", "min_consumer_ctas", 4, "1"),
        ("mover", "copy_engine", "num_consumer_ctas", 4, '"auto"'),
        ("mover", "copy_engine", "min_consumer_ctas", 4, "1"),
        ("dispatch", "nccl", "num_dispatch_ctas", 4, '"auto"'),
    ],
)
def test_settings_that_another_leaves_without_a_use(
    name: str, value: str, other: str, got: int, default: str
) -> None:
    message = refusal({name: value, other: got})
    assert message == (
        f'tile_overlap.{other}: got {got}; wanted {default} with {name} "{value}"; fix: leave it'
        f" out, or choose another {name}"
    )
    block = {name: value, other: TileOverlapConfig.model_fields[other].default}
    assert getattr(load_config(block), name) == value
    assert load_config({other: got}) == load_config({name: "auto", other: got})
    assert without_unused({name: value, other: got, "tile_m": 16}) == {name: value, "tile_m": 16}
    assert without_unused({name: "auto", other: got}) == {name: "auto", other: got}


def test_faults_across_fields_come_with_those_of_fields() -> None:
    block = {"mover": "copy_engine", "transport": "nvshmem"}
    message = refusal({"tile_m": -1, "layers": "(", "strict": 1, **block})
    assert [line.split(":")[0] for line in message.splitlines()] == [
        f"tile_overlap.{name}" for name in ("tile_m", "strict", "layers", "mover")
    ]
    # A bound that is wrong itself is no bound.
    assert len(refusal({"min_consumer_ctas": "4", "num_consumer_ctas": 2}).splitlines()) == 1


def test_keys_that_are_no_text() -> None:
    rest = "got the key 1; wanted names of fields; fix: quote it"
    assert refusal({1: 2}) == f"tile_overlap: {rest}"
    assert refusal({"adaptive": {1: 2}}) == f"tile_overlap.adaptive: {rest}"
    assert "tile_overlap.self: got an unknown key" in refusal({"self": 1})


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("num_dispatch_ctas", 4, '"auto"'),
        ("dispatch", "nccl", '"auto" or "fused"'),
        ("router", "fused", '"auto" or "deepspeed"'),
        ("router_logits", "bf16x3", '"auto" or "deepspeed"'),
        ("transport", "nvshmem", '"auto" or "mapped"'),
    ],
)
def test_what_only_the_cuda_backend_has(key: str, value: object, wanted: str) -> None:
    """Refused as soon as it is known that the CPU backend will run."""
    for backend in ("auto", "cuda"):
        assert getattr(load_config({"backend": backend, key: value}), key) == value
    message = refusal({"backend": "cpu", key: value})
    assert f"{key}: got {json.dumps(value)}; wanted {wanted}; fix: " in message
    assert "the CPU backend has no such thing" in message
    with pytest.raises(ConfigError, match="the CPU backend has no such thing"):
        check_cpu_config(TileOverlapConfig(**{key: value}))
    check_cpu_config(TileOverlapConfig(dispatch="fused", router="deepspeed", transport="mapped"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_dispatch_ctas", 4),
        ("dispatch", "nccl"),
        ("router", "fused"),
        ("router_logits", "bf16x3"),
        ("transport", "nvshmem"),
        ("min_consumer_ctas", 9),
    ],
)
def test_layers_on_the_cpu_raise_what_it_cannot_meet_as_a_config_error(
    key: str, value: object
) -> None:
    """Found out only when the layers are seen, and still the block's fault: nothing to install."""
    from moe_models import make_moe

    import ds_tilemoe

    moe = make_moe()
    kind = type(moe.deepspeed_moe)
    with pytest.raises(ConfigError, match=rf"tile_overlap\.{key}: got {json.dumps(value)}; wanted"):
        ds_tilemoe.apply(moe, {key: value})
    assert type(moe.deepspeed_moe) is kind


def test_adaptive_takes_its_fields() -> None:
    adaptive = {"enabled": False, "interval": 3, "hysteresis": 0.1, "cache_dir": "/tmp"}
    assert load_config({"adaptive": adaptive}).adaptive.model_dump() == adaptive
    assert load_config({"adaptive": {"interval": 2}}).adaptive.hysteresis == 0.02
    for bad in (
        {"interval": 0},
        {"hysteresis": 1},
        {"cache_dir": 3},
        {"cache_dir": ""},
        {"cache_dir": "a\0b"},
    ):
        assert f"tile_overlap.adaptive.{next(iter(bad))}: got" in refusal({"adaptive": bad})


def test_bounds_by_backend() -> None:
    for key in ("num_consumer_ctas", "min_consumer_ctas", "max_consumer_ctas"):
        for backend in ("auto", "cuda"):
            assert getattr(load_config({"backend": backend, key: 131}), key) == 131
        message = refusal({"backend": "cpu", key: 9})
        assert f"tile_overlap.{key}: got 9; wanted " in message
        assert "an integer from 1 to 8 on the CPU backend; fix: " in message
        with pytest.raises(ConfigError, match=f"{key}: got 131"):
            check_cpu_config(load_config({key: 131}))
    check_cpu_config(load_config({"num_consumer_ctas": 8}))


def test_bounds_across_fields() -> None:
    assert "max_consumer_ctas" in refusal({"min_consumer_ctas": 3, "max_consumer_ctas": 2})
    assert "max_consumer_ctas (2)" in refusal({"num_consumer_ctas": 3, "max_consumer_ctas": 2})
    message = refusal({"num_consumer_ctas": 1, "min_consumer_ctas": 2})
    assert "of at least min_consumer_ctas (2)" in message
    assert "max_consumer_ctas" not in message  # nobody has set it


@pytest.mark.parametrize(
    "name",
    [
        "tile-overlap",
        "tile_overalp",
        "tileoverlap",
        "TileOverlap",
        "tile_overlaps",
        "tile overlap",
        "tile_overlap_config",
        "ds_tilemoe.tile_overlap",
    ],
)
def test_misspelt_block_is_refused_with_the_right_name(name: str) -> None:
    for source in ({name: {}, **BATCH}, {name: {}}, {name: {}, "tile_overlap": {}}):
        assert refusal(source).startswith(
            f'{name}: got a block of this name; wanted "tile_overlap"'
        )


@pytest.mark.parametrize("outer", ["zero_optimization", "expert_parallel", "my_own"])
@pytest.mark.parametrize("name", ["tile_overlap", "tile-overlap"])
def test_block_inside_another_is_refused(outer: str, name: str) -> None:
    message = refusal({outer: {"deep": [{name: {}}]}, **BATCH})
    assert f"{outer}.deep[0].{name}: got the block inside" in message
    assert "top level" in message


def test_field_beside_the_block_is_refused() -> None:
    assert 'inside "tile_overlap"' in refusal({"num_consumer_ctas": 2, **BATCH})
    assert 'inside "tile_overlap"' in refusal({"tile_m": 2, "tile_overlap": {}})


@pytest.mark.parametrize("key", TileOverlapConfig.model_fields)
def test_fields_without_the_block_are_refused(key: str, tmp_path: Path) -> None:
    """DeepSpeed says nothing of them, so they would be ignored."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({key: DEFAULTS[key]}))
    engine = SimpleNamespace(module=None, _config=SimpleNamespace(_param_dict={key: 1, **BATCH}))
    wanted = f'{key}: got it at the top level of the ds_config; wanted it inside "tile_overlap"'
    for load in (
        lambda: split_config({key: DEFAULTS[key]}),
        lambda: split_config(path),
        lambda: load_config({key: DEFAULTS[key], **BATCH}),
        lambda: load_config(engine),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(wanted)}; fix: write "):
            load()
    # The block alone is what it is, and a model's own config is nothing of ours.
    assert load_config(path) == load_config({key: DEFAULTS[key]}) == TileOverlapConfig()
    assert load_config(SimpleNamespace(module=None, config={key: 1})) == TileOverlapConfig()


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("num_consumer_cta", "num_consumer_ctas"),
        ("num-consumer-ctas", "num_consumer_ctas"),
        ("Mover", "mover"),
        ("wait_timeout", "wait_timeout_s"),
    ],
)
def test_misspelt_fields_without_the_block_are_refused(key: str, field: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{key}: got it at .*overlap\": {{\"{field}\": \.\.\.}}"
    ):
        split_config({key: 3})


def test_all_fields_at_the_top_level_are_told_at_once() -> None:
    lines = refusal({**BATCH, "mover": "none", "layers": "a"}).splitlines()
    assert [line.split(":")[0] for line in lines] == ["mover", "layers"]
    assert 'or "tile_overlap": {} beside it if the key is not meant for ds_tilemoe' in lines[1]


def test_keys_that_deepspeed_knows_are_not_taken_for_ours() -> None:
    from deepspeed.inference.config import DeepSpeedInferenceConfig
    from deepspeed.runtime import constants

    known = {value for value in vars(constants).values() if isinstance(value, str)}
    known -= {constants.FP16_ENABLED}  # inside blocks of theirs only
    for name, field in DeepSpeedInferenceConfig.model_fields.items():
        known |= {name, field.alias or name}
    assert {"train_batch_size", "zero_allow_untested_optimizer", "max_tokens", "tp"} < known
    whole = dict.fromkeys(known | DS_CONFIG_KEYS, 1)
    assert split_config(whole) == (whole, TileOverlapConfig())


@pytest.mark.parametrize("block", [None, [], "on", 3, True])
def test_block_has_to_be_a_block(block: object) -> None:
    assert refusal({"tile_overlap": block}).startswith(f"tile_overlap: got {json.dumps(block)}")


def test_foreign_keys_of_a_ds_config_are_left_alone() -> None:
    whole = {**BATCH, "zero_optimization": {"overlap_comm": True}, "moe_overlap": {}}
    assert load_config(whole) == TileOverlapConfig()
    assert load_config({**whole, "layers": 3, "tile_overlap": {}}) == TileOverlapConfig()


def test_ds_config_keys_are_deepspeeds() -> None:
    import deepspeed

    package = Path(deepspeed.__file__).parent
    files = [*package.rglob("*config*.py"), *package.rglob("constants.py")]
    text = "".join(path.read_text() for path in files)
    assert [key for key in DS_CONFIG_KEYS if not re.search(rf"\b{key}\b", text)] == []
    assert not DS_CONFIG_KEYS & set(TileOverlapConfig.model_fields)


@pytest.mark.parametrize("path", sorted(DS_CONFIGS.glob("*.json")), ids=lambda path: path.name)
def test_shipped_files_load(path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    loaded = load_config(path)
    assert loaded == load_config(str(path)) == load_config(json.loads(path.read_text()))
    assert DeepSpeedConfig(str(path)).train_micro_batch_size_per_gpu == 1
    wanted = {"aligned.json": ("layout", "aligned"), "no_overlap.json": ("mover", "none")}
    key, value = wanted.get(path.name, ("stats", True))
    assert getattr(loaded, key) == value


def test_hjson_and_base64(tmp_path: Path) -> None:
    path = tmp_path / "ds.hjson"
    path.write_text("{\n  # a comment\n  train_batch_size: 4\n  tile_overlap: {tile_m: 32}\n}\n")
    assert load_config(path).tile_m == 32
    text = json.dumps({"tile_overlap": {"tile_m": 48, "layers": "x" * 300}, **BATCH})
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    assert load_config(encoded).tile_m == 48


def test_unreadable_sources(tmp_path: Path) -> None:
    for missing in (tmp_path / "none.json", str(tmp_path / "none.json"), "ds_config", "abcd"):
        message = refusal(missing)
        assert f"ds_config {str(missing)!r}: no such file" in message
    assert "cannot be read" in refusal(tmp_path)
    broken = tmp_path / "broken.json"
    broken.write_text('{"tile_overlap": {"tile_m": 3}')
    assert "broken.json" in refusal(broken)
    assert "line 1" in refusal(broken)
    broken.write_text("[1, 2]")
    assert "wanted an object" in refusal(broken)
    broken.write_text('{"tile_overlap": {"tile_m": 3, "tile_m": 4}}')
    assert "tile_m: got the key twice" in refusal(broken)
    for odd in (3, [], object(), {"tile_overlap": {3: 1}}):
        assert "wanted" in refusal(odd)


def test_engines() -> None:
    parsed = {"tile_overlap": {"tile_m": 8}, **BATCH}
    engine = SimpleNamespace(module=None, config="gone.json", _config=SimpleNamespace())
    engine._config._param_dict = parsed
    assert load_config(engine).tile_m == 8
    assert load_config(SimpleNamespace(module=None, config=parsed)).tile_m == 8
    assert "tile_overalp" in refusal(SimpleNamespace(module=None, config={"tile_overalp": {}}))
    assert load_config(SimpleNamespace(module=None, config=None)) == TileOverlapConfig()


def test_no_block_means_defaults_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with caplog.at_level(logging.INFO, "ds_tilemoe"):
        for _ in range(3):
            assert load_config(BATCH) == TileOverlapConfig()
        assert len(caplog.records) == 1
        assert 'no "tile_overlap" block; all settings have their defaults' in caplog.text
        assert load_config(None) == load_config() == TileOverlapConfig()
        assert len(caplog.records) == 2
        assert load_config({}) == load_config({"tile_overlap": {}, **BATCH}) == TileOverlapConfig()
        assert len(caplog.records) == 2
        monkeypatch.setenv("RANK", "1")
        config_module._log_once.cache_clear()
        load_config(BATCH)
        assert len(caplog.records) == 2


def test_split_for_init_inference(tmp_path: Path) -> None:
    from deepspeed.inference.config import DeepSpeedInferenceConfig

    whole = {"tensor_parallel": {"tp_size": 1}, "tile_overlap": {"tile_m": 8}}
    with pytest.raises(ValueError, match="tile_overlap"):
        DeepSpeedInferenceConfig(**whole)
    rest, block = split_config(whole)
    DeepSpeedInferenceConfig(**rest)
    assert block.tile_m == 8
    assert rest == {"tensor_parallel": {"tp_size": 1}}
    assert "tile_overlap" in whole
    path = tmp_path / "inference.json"
    path.write_text(json.dumps(whole))
    assert split_config(path) == (rest, block)


@pytest.mark.parametrize(("odd", "kind"), [(5, "int"), (None, "NoneType"), ([], "list")])
def test_split_of_what_is_no_ds_config(odd: Any, kind: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^ds_config: got a {kind}; wanted a mapping or the path"
    ):
        split_config(odd)


def test_constructor_and_load_refuse_alike() -> None:
    with pytest.raises(ConfigError, match=r"tile_overlap\.tile_mm.*'tile_m'"):
        TileOverlapConfig(tile_mm=3)
    config = TileOverlapConfig(tile_m=3)
    assert load_config(config) == config
    with pytest.raises(ConfigError, match=r"bands_per_segment.*got 0"):
        load_config(config.model_copy(update={"bands_per_segment": 0}))
    assert load_config(config.model_dump()) == config


@pytest.mark.parametrize(
    "block",
    [
        {"layers": "a{999999999999}"},
        {"layers": "(a" * 5000},
        {"\ud800": 1},
        {"layers": "x\ud800("},
    ],
)
def test_whatever_is_wrong_is_a_config_error(block: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="tile_overlap"):
        load_config(block)


@pytest.mark.parametrize(
    ("text", "where", "got"),
    [
        ('{"tile_m":NaN}', "tile_m", "NaN"),
        (
            '{"tile_overlap": {"adaptive": {"hysteresis": -Infinity}}}',
            "tile_overlap.adaptive",
            "-I",
        ),
        ('{"tile_overlap": {"tile_m": 1e999}}', "tile_overlap.tile_m", "1e999"),
        ("{\n  train_batch_size: 1\n  betas: [0.9, -1e400]\n}", "betas[1]", "-1e400"),
    ],
)
def test_numbers_that_are_not_finite(tmp_path: Path, text: str, where: str, got: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    for load in (load_config, split_config):
        with pytest.raises(
            ConfigError, match=re.escape(f"ds_config {str(path)!r}: {where}")
        ) as told:
            load(path)
        assert f": got {got}" in str(told.value)
        assert "wanted a finite number; fix: " in str(told.value)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"tile_overlap": {"tile_m": %s}}', "tile_overlap.tile_m"),
        ("{\n  train_batch_size: 1\n  sizes: [1, -%s]\n}", "sizes[1]"),
    ],
)
def test_numbers_of_more_digits_than_python_reads(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text % ("1" * 5000))
    message = refusal(path)
    assert f"ds_config {str(path)!r}: {where}: got " in message
    assert "111... (5000 digits); wanted a number of at most 4300 digits; fix: " in message
    assert len(message) < 500


def test_numbers_of_more_digits_than_python_writes() -> None:
    for block in ({"tile_m": 10**5000}, {"adaptive": {"interval": 10**5000}}):
        assert "got int (Exceeds the limit (4300 digits) for integer" in refusal(block)


@pytest.mark.parametrize(
    "text",
    ['{"x": ' * 3000 + "1" + "}" * 3000, '{"wait_timeout_s": 1e400}', "{x: " + "1" * 5000 + "}"],
)
def test_files_that_overwhelm_the_parser(tmp_path: Path, text: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError):
        load_config(tmp_path / "ds.json")
