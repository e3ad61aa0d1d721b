"""Where the ``tile_overlap`` block of a DeepSpeed configuration is read. No torch, no deepspeed.

DeepSpeed accepts unknown top-level keys of a ds_config in silence, so every misspelling has to be
caught here: of a field, of the block's own name, and of the place where the block stands.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import difflib
import functools
import json
import logging
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hjson

from ds_tilemoe.config_block import BLOCK, AdaptiveConfig, TileOverlapConfig, odd_key, shorten, show
from ds_tilemoe.errors import ConfigError

__all__ = ["BLOCK", "AdaptiveConfig", "TileOverlapConfig", "load_config", "split_config"]

logger = logging.getLogger("ds_tilemoe")

# Top-level keys that tell a whole ds_config from the block alone (deepspeed/runtime/constants.py,
# inference/config.py). DeepSpeed demands one of the first two for initialize().
DS_CONFIG_KEYS = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "steps_per_print",
        "wall_clock_breakdown",
        "optimizer",
        "scheduler",
        "fp16",
        "bf16",
        "zero_optimization",
        "gradient_clipping",
        "activation_checkpointing",
        "flops_profiler",
        "comms_logger",
        "expert_parallel",
        "torch_autocast",
        "prescale_gradients",
        "dump_state",
        "aio",
        "tensorboard",
        "csv_monitor",
        "wandb",
        "data_types",
        "checkpoint",
        "compile",
        "dtype",
        "tensor_parallel",
        "replace_with_kernel_inject",
        "moe",
    }
)


def load_config(source: object = None) -> TileOverlapConfig:
    """Reads and checks the block.

    Args:
        source: a TileOverlapConfig; the block or a whole ds_config as a
            mapping; the path of a JSON or HJSON file of either, or its base64 text, as DeepSpeed
            takes them; a DeepSpeed engine (the ds_config it was made with); None for all defaults.

    Returns:
        The checked block; all defaults, logged once a process on rank 0, where there is none.

    Raises:
        ConfigError: see TileOverlapConfig; also a missing or unreadable file, a misspelt block
            name, a block inside another block.
    """
    if isinstance(source, TileOverlapConfig):  # pydantic checks no model_copy(update=...)
        return _check_block(source.model_dump(exclude_unset=True))
    if source is None:
        return _defaults("no configuration was given")
    if isinstance(source, str | Path):
        return _from_mapping(_read(source))
    if isinstance(source, Mapping):
        return _from_mapping(source)
    if hasattr(source, "module") and (hasattr(source, "_config") or hasattr(source, "config")):
        return _from_engine(source)
    raise ConfigError(
        f"{BLOCK}: got a {type(source).__name__}; wanted a mapping, the path of a JSON file, a "
        f'DeepSpeed engine or None; fix: pass the block itself, e.g. {{"num_consumer_ctas": 2}}'
    )


def split_config(
    ds_config: Mapping[str, Any] | str | Path,
) -> tuple[dict[str, Any], TileOverlapConfig]:
    """Parts a ds_config into what DeepSpeed may see and our block.

    ``deepspeed.init_inference`` refuses every key that it does not know, this block included; give
    it the first and ``ds_tilemoe.apply`` the second. ``deepspeed.initialize`` takes the whole.

    Args:
        ds_config: a whole one, never the block alone: a mapping, or a file as for load_config.

    Returns:
        A shallow copy of ``ds_config`` without the block, and the checked block.

    Raises:
        ConfigError: as load_config; also a field of the block at the top level.
    """
    if not isinstance(ds_config, Mapping | str | Path):
        raise ConfigError(
            f"ds_config: got a {type(ds_config).__name__}; wanted a mapping or the path of a JSON "
            f'or HJSON file; fix: pass the whole ds_config, e.g. {{"{BLOCK}": {{}}}}'
        )
    whole = ds_config if isinstance(ds_config, Mapping) else _read(ds_config)
    return _split(whole)


def _split(
    whole: Mapping[str, Any], any_fields: bool = False
) -> tuple[dict[str, Any], TileOverlapConfig]:
    """As split_config; ``any_fields``: keys of our fields' names may be someone else's."""
    _refuse_misplaced(whole)
    if not any_fields:
        _refuse_fields(whole)
    block = _defaults(f'the ds_config has no "{BLOCK}" block') if BLOCK not in whole else None
    rest = {key: value for key, value in whole.items() if key != BLOCK}
    return rest, block or _check_block(whole[BLOCK])


def _from_engine(engine: Any) -> TileOverlapConfig:
    # initialize() keeps what it parsed in _config._param_dict; engine.config is what it was passed,
    # maybe a path. An engine of init_inference holds the model's own config there, or nothing; its
    # keys are the model's, so names of our fields mean nothing among them.
    whole = kept = getattr(getattr(engine, "_config", None), "_param_dict", None)
    if kept is None:
        whole = getattr(engine, "config", None)
    if isinstance(whole, str | Path):
        whole = _read(whole)
    if not isinstance(whole, Mapping):
        return _defaults(f"the engine ({type(engine).__name__}) carries no ds_config")
    return _split(whole, any_fields=kept is None and BLOCK not in whole)[1]


def _from_mapping(mapping: Mapping[str, Any]) -> TileOverlapConfig:
    whole = BLOCK in mapping or not DS_CONFIG_KEYS.isdisjoint(mapping)
    if whole:
        return split_config(mapping)[1]
    _refuse_misplaced(mapping)
    return _check_block(mapping)


def _check_block(block: object) -> TileOverlapConfig:
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"{BLOCK}: got {show(block)}; wanted a block of settings; "
            f'fix: write "{BLOCK}": {{}} for all defaults'
        )
    if odd := [key for key in block if not isinstance(key, str)]:
        raise ConfigError(odd_key(BLOCK, odd[0]))
    return TileOverlapConfig(**block)


@functools.cache
def _log_once(message: str) -> None:
    # WARNING, so that it is seen where nobody has set up logging: a block that was written and is
    # not read costs its author hours.
    if os.environ.get("RANK", "0") == "0":
        logger.warning(message)


def _defaults(why: str) -> TileOverlapConfig:
    _log_once(f"{BLOCK}: {why}; all settings have their defaults")
    return TileOverlapConfig()


def _read(source: str | Path) -> Mapping[str, Any]:
    path = Path(source)
    try:
        found = path.exists()
    except OSError:  # base64 text can be longer than a file name may be
        found = False
    if found:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"ds_config {str(source)!r} cannot be read: {error}; wanted a JSON or HJSON file; "
                "fix: name such a file"
            ) from None
    else:
        text = _base64_text(source)
    name = f"ds_config {shorten(str(source))!r}"
    try:
        parsed = hjson.loads(
            text, object_pairs_hook=_no_duplicates, parse_float=_number, parse_int=_integer
        )
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        with contextlib.suppress(RecursionError):
            _refuse_infinite(_as_json(text), name)  # HJSON has no word for these
        raise ConfigError(f"{name} is not JSON or HJSON: {error}; fix: mend that line") from None
    _refuse_infinite(parsed, name)
    if not isinstance(parsed, Mapping):
        raise ConfigError(
            f"{name}: got {show(parsed)}; wanted an object {{...}}; "
            "fix: wrap the settings in braces"
        )
    return parsed


class _TooLarge(float):
    """A number of a file beyond float's range, or beyond the digits that Python reads."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __int__(self) -> int:
        return 0  # hjson asks each number whether it is whole, and an infinite one has no answer


def _number(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _TooLarge(text)


def _integer(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:  # more digits than sys.get_int_max_str_digits() allows
        return _TooLarge(text)


def _as_json(text: str) -> object:
    """What Python's json makes of it, NaN and Infinity included; None if nothing."""
    try:
        return json.loads(text, parse_float=_number, parse_int=_integer)
    except (ValueError, RecursionError):
        return None


def _refuse_infinite(parsed: object, name: str) -> None:
    """Raises on the first number that is not finite, or too long to be read."""
    for where, _, value in _inside(parsed, ""):
        if isinstance(value, float) and not math.isfinite(value):
            got, wanted = show(value), "a finite number"
            if isinstance(value, _TooLarge):
                got, digits = shorten(value.text), value.text.removeprefix("-")
                if digits.isdecimal():
                    got += f" ({len(digits)} digits)"
                    wanted = f"a number of at most {sys.get_int_max_str_digits()} digits"
            raise ConfigError(
                f"{name}: {where}: got {got}; wanted {wanted}; fix: write one, or leave the key out"
            )


def _base64_text(source: str | Path) -> str:
    missing = ConfigError(
        f"ds_config {shorten(str(source))!r}: no such file in {os.getcwd()!r}; wanted the path "
        "of a JSON or HJSON file, or its text in base64; fix: check the path"
    )
    if not isinstance(source, str):
        raise missing
    try:
        # As DeepSpeed reads it, but strict: by default letters outside the alphabet are dropped, so
        # that many a misspelt path would decode.
        raw = base64.b64decode(source.strip(), altchars=b"-_", validate=True)
        text = raw.decode("utf-8")
    except (binascii.Error, ValueError):
        raise missing from None
    if not text.lstrip().startswith("{"):
        raise missing
    return text


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"{twice}: got the key twice in one block; wanted it once; fix: remove one"
        )
    return result


def _is_block_name(key: object) -> bool:
    plain = re.sub(r"[^a-z]", "", str(key).lower())
    return (
        "tileoverlap" in plain or difflib.SequenceMatcher(None, plain, "tileoverlap").ratio() > 0.8
    )


def _refuse_misplaced(whole: Mapping[str, Any]) -> None:
    """Raises on what looks like our block, of another name or anywhere but at the top."""
    for key, value in whole.items():
        if key == BLOCK:
            continue
        if _is_block_name(key):
            raise ConfigError(
                f'{key}: got a block of this name; wanted "{BLOCK}"; fix: rename it to "{BLOCK}"'
            )
        for where in (path for path, name, _ in _inside(value, str(key)) if _is_block_name(name)):
            raise ConfigError(
                f'{where}: got the block inside "{where.rsplit(".", 1)[0]}"; wanted "{BLOCK}" '
                "at the top level of the ds_config; fix: move it there"
            )


# Words that may be someone else's key of a ds_config, where our block is there beside them.
_COMMON = frozenset({"enabled", "backend", "layers", "strict", "stats"})


def _refuse_fields(whole: Mapping[str, Any]) -> None:
    """Raises on fields of our block, misspelt ones too, at the top level of a ds_config."""
    faults = []
    fields = TileOverlapConfig.model_fields
    ours = [name for name in fields if "_" in name]  # long enough to tell a misspelling
    for key in whole:
        plain = re.sub(r"[^a-z0-9]+", "_", str(key).lower())
        near = [plain] if plain in fields else difflib.get_close_matches(plain, ours, 1, 0.85)
        if not near or (near[0] in _COMMON and BLOCK in whole):
            continue
        name = near[0]
        fix = f'write "{BLOCK}": {{"{name}": ...}}'
        if name in _COMMON:
            fix += f', or "{BLOCK}": {{}} beside it if the key is not meant for ds_tilemoe'
        faults.append(
            f'{key}: got it at the top level of the ds_config; wanted it inside "{BLOCK}"; '
            f"fix: {fix}"
        )
    if faults:
        raise ConfigError("\n".join(faults))


def _inside(value: object, where: str) -> Iterator[tuple[str, object, object]]:
    """Path, key and value of all below ``value``; what stands in a list has no key."""
    found: list[tuple[str, object, object]] = []
    if isinstance(value, Mapping):
        found = [(f"{where}.{key}" if where else str(key), key, value[key]) for key in value]
    elif isinstance(value, list | tuple):
        found = [(f"{where}[{position}]", None, inner) for position, inner in enumerate(value)]
    for path, key, inner in found:
        yield path, key, inner
        yield from _inside(inner, path)
