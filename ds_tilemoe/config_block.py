"""The fields of the ``tile_overlap`` block: types, bounds, and the words of every refusal.

Pure Python: no torch, no deepspeed.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds_tilemoe.errors import ConfigError

BLOCK = "tile_overlap"
MAX_CPU_CONSUMERS = 8  # consumer threads of a rank on the CPU backend
MAX_CUDA_CTAS = 255  # more SMs than any GPU has; the GPU at hand sets its own bound
MAX_CPU_TILE = 4096  # rows or columns of a tile on the CPU backend
MIN_WAIT_S, MAX_WAIT_S = 0.001, 1e6  # deadlines are counted in 64-bit ns, and told in ms
MAX_COUNT = 2**31 - 1  # counts are 32-bit integers

# Fields of which the CPU backend has less than CUDA: field -> values that it takes.
CPU_TAKES: dict[str, tuple[str, ...]] = {
    "num_dispatch_ctas": ("auto",),
    "mover": ("auto", "sm", "none"),
    "dispatch": ("auto", "fused"),
    "router": ("auto", "deepspeed"),
    "router_logits": ("auto", "deepspeed"),
    "transport": ("auto", "mapped"),
}

# A setting that leaves others without a use: field, value -> fields that then have their defaults.
_NO_CONSUMER = ("num_consumer_ctas", "min_consumer_ctas")
UNUSED: dict[tuple[str, str], tuple[str, ...]] = {
    ("mover", "none"): _NO_CONSUMER,
    ("mover", "copy_engine"): _NO_CONSUMER,
    ("dispatch", "nccl"): ("num_dispatch_ctas",),
}

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Tile = Annotated[int, Field(ge=1, le=MAX_CPU_TILE)]
Ctas = Annotated[int, Field(ge=1, le=MAX_CUDA_CTAS)]
CONSUMER_BOUNDS = f"{MAX_CPU_CONSUMERS} on the CPU, less than the SMs of a GPU on CUDA"


class AdaptiveConfig(BaseModel):
    """The ``adaptive`` part of the block: how the controller moves the split.

    The ``description`` of a field, here and below, is the values wanted, as errors print them.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    enabled: bool = Field(True, description="true or false")
    interval: Count = Field(1, description="an integer of at least 1")
    hysteresis: float = Field(0.02, ge=0, lt=1, description="a number from 0 to below 1")
    cache_dir: Annotated[str, Field(pattern=r"^[^\x00]+$")] | None = Field(
        None, description="a directory name (not empty, without NUL) or null"
    )


class TileOverlapConfig(BaseModel):
    """The whole block. ``"auto"`` is chosen by the backend; anything explicit is met or refused.

    Raises:
        ConfigError: a field is unknown, of the wrong type or out of range. The
            message lists every fault: key, value got, values wanted, fix.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    enabled: bool = Field(True, description="true or false")
    backend: Literal["auto", "cuda", "cpu"] = Field("auto", description='"auto", "cuda" or "cpu"')
    layout: Literal["auto", "compact", "aligned"] = Field(
        "auto", description='"auto", "compact" or "aligned"'
    )
    tile_m: Literal["auto"] | Tile = Field(
        "auto", description=f'"auto" or an integer from 1 to {MAX_CPU_TILE}'
    )
    tile_n: Literal["auto"] | Tile = Field(
        "auto", description=f'"auto" or an integer from 1 to {MAX_CPU_TILE}'
    )
    num_consumer_ctas: Literal["auto"] | Ctas = Field(
        "auto", description=f'"auto" or an integer from 1 to {CONSUMER_BOUNDS}'
    )
    min_consumer_ctas: Ctas = Field(1, description=f"an integer from 1 to {CONSUMER_BOUNDS}")
    max_consumer_ctas: Literal["auto"] | Ctas = Field(
        "auto", description=f'"auto" or an integer from 1 to {CONSUMER_BOUNDS}'
    )
    num_dispatch_ctas: Literal["auto"] | Ctas = Field(
        "auto", description='"auto" or an integer from 1 to less than the SMs of a GPU'
    )
    bands_per_segment: Literal["auto"] | Count = Field(
        "auto", description='"auto" or an integer of at least 1'
    )
    local_tail_waves: Literal["auto", "all"] | Annotated[int, Field(ge=0, le=MAX_COUNT)] = Field(
        "auto", description='"auto", "all" or an integer of at least 0'
    )
    mover: Literal["auto", "sm", "copy_engine", "none"] = Field(
        "auto", description='"auto", "sm", "copy_engine" or "none"'
    )
    dispatch: Literal["auto", "fused", "nccl"] = Field(
        "auto", description='"auto", "fused" or "nccl"'
    )
    router: Literal["auto", "deepspeed", "fused"] = Field(
        "auto", description='"auto", "deepspeed" or "fused"'
    )
    router_logits: Literal["auto", "deepspeed", "bf16x3"] = Field(
        "auto", description='"auto", "deepspeed" or "bf16x3"'
    )
    transport: Literal["auto", "mapped", "nvshmem"] = Field(
        "auto", description='"auto", "mapped" or "nvshmem"'
    )
    max_tokens_per_rank: Literal["auto"] | Count = Field(
        "auto", description='"auto" or an integer of at least 1'
    )
    adaptive: AdaptiveConfig = Field(
        AdaptiveConfig(), description="a block of enabled, interval, hysteresis and cache_dir"
    )
    layers: str = Field(".*", description="a regular expression of layer names")
    strict: bool = Field(False, description="true or false")
    wait_timeout_s: float = Field(
        60.0,
        ge=MIN_WAIT_S,
        le=MAX_WAIT_S,
        description=f"a number of seconds from {MIN_WAIT_S} to {MAX_WAIT_S:.0f}",
    )
    stats: bool = Field(False, description="true or false")

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            faults = _explain(error)
            wrong = {name.split(".")[0] for name in faults}
            sound = {name: value for name, value in values.items() if name not in wrong}
            if len(sound) < len(values):  # what is wrong across the other fields
                try:
                    TileOverlapConfig(**sound)
                except ConfigError as more:
                    faults["across"] = str(more)
            raise ConfigError("\n".join(faults.values())) from None
        if across := list(_faults_across(self)):
            raise ConfigError("\n".join(across))


def _faults_across(config: TileOverlapConfig) -> Iterator[str]:
    """Faults that a type cannot state: bounds of one field by another."""
    try:
        re.compile(config.layers)
    except (re.error, OverflowError, RecursionError) as error:
        yield _fault("layers", config.layers, f"mend the expression ({error})")
    low, high = config.min_consumer_ctas, config.max_consumer_ctas
    if high != "auto" and low > high:
        yield (
            f"{BLOCK}.min_consumer_ctas: got {low}; wanted at most max_consumer_ctas, "
            f"which is {high}; fix: lower it or raise the other"
        )
    if config.backend == "cpu":
        yield from _cpu_faults(config)
    if config.mover == "copy_engine" and config.transport == "nvshmem":
        fix = 'let transport be "auto": copies go to mapped memory'
        yield _fault("mover", "copy_engine", fix, '"auto", "sm" or "none" with transport "nvshmem"')
    if config.router_logits == "bf16x3" and config.router == "deepspeed":
        yield _fault("router_logits", "bf16x3", 'write "auto", or let router be "auto"')
    for (name, value), others in UNUSED.items():
        if getattr(config, name) != value:
            continue
        for other in others:
            field, got = TileOverlapConfig.model_fields[other], getattr(config, other)
            if got != field.default:
                fix = f"leave it out, or choose another {name}"
                yield _fault(other, got, fix, f"{show(field.default)} with {name} {show(value)}")
    chosen = config.num_consumer_ctas
    if chosen == "auto":
        return
    if high == "auto":
        bounds = "" if low <= chosen else f"of at least min_consumer_ctas ({low})"
    else:
        bounds = f"from min_consumer_ctas ({low}) to max_consumer_ctas ({high})"
        bounds = "" if low > high or low <= chosen <= high else bounds
    if bounds:
        yield (
            f"{BLOCK}.num_consumer_ctas: got {chosen}; wanted a number {bounds}; "
            "fix: change it or the bound"
        )


def without_unused(block: Mapping[str, Any]) -> dict[str, Any]:
    """A block, or settings that are in force, without what its mover or dispatch has no use for."""
    unused = {
        other
        for (name, value), others in UNUSED.items()
        if block.get(name) == value
        for other in others
    }
    return {name: value for name, value in block.items() if name not in unused}


def check_cpu_config(config: TileOverlapConfig) -> None:
    """Refuse what the CPU backend cannot meet; ``backend: "auto"`` leaves it open until then.

    Raises:
        ConfigError: names each key, value and bound.
    """
    if faults := list(_cpu_faults(config)):
        raise ConfigError("\n".join(faults))


def _cpu_faults(config: TileOverlapConfig) -> Iterator[str]:
    for name in ("num_consumer_ctas", "min_consumer_ctas", "max_consumer_ctas"):
        value = getattr(config, name)
        if value != "auto" and value > MAX_CPU_CONSUMERS:
            auto = "" if name == "min_consumer_ctas" else '"auto" or '
            wanted = f"{auto}an integer from 1 to {MAX_CPU_CONSUMERS} on the CPU backend"
            yield _fault(name, value, wanted=wanted)
    for name, accepted in CPU_TAKES.items():
        value = getattr(config, name)
        if value not in accepted:
            wanted = " or ".join(map(show, accepted))
            yield _fault(
                name, value, f"leave {name} out: the CPU backend has no such thing", wanted
            )


def _explain(error: ValidationError) -> dict[str, str]:
    """All faults of one validation, a line a name; a union's several errors for one are one."""
    lines: dict[str, str] = {}
    for entry in error.errors():
        # A key that is no Unicode text has no place of its own in pydantic's list.
        parts = [str(part) for part in entry["loc"]] or ["?"]
        if parts == ["?"]:
            lines["?"] = (
                f"{BLOCK}: got a key or value that is no Unicode text; wanted the keys of the "
                "README; fix: remove it"
            )
            continue
        if entry["type"] == "invalid_key":
            where = ".".join([BLOCK, *parts[:-1]])
            lines[".".join(parts)] = odd_key(where, entry["loc"][-1])
            continue
        nested = parts[0] == "adaptive" and len(parts) > 1
        name = ".".join(parts[:2]) if nested else parts[0]
        if entry["type"] == "extra_forbidden":
            valid = (AdaptiveConfig if nested else TileOverlapConfig).model_fields
            near = difflib.get_close_matches(parts[nested], valid, 1, cutoff=0.0)[0]
            lines[name] = (
                f"{BLOCK}.{name}: got an unknown key; the nearest valid one is {near!r}; "
                "fix: rename or remove it"
            )
        elif name not in lines:
            lines[name] = _fault(name, entry["input"])
    return lines


def odd_key(where: str, key: object) -> str:
    """What to say of a key that is no text."""
    return f"{where}: got the key {show(key)}; wanted names of fields; fix: quote it"


def _fault(name: str, value: object, fix: str = "", wanted: str = "") -> str:
    block: type[BaseModel] = AdaptiveConfig if name.startswith("adaptive.") else TileOverlapConfig
    key = name.removeprefix("adaptive.")
    field = block.model_fields[key]
    # The bound of a count's type says nothing about layers; only who passed it has to know.
    full = re.sub(r"of at least (\d+)$", rf"from \1 to {MAX_COUNT}", field.description or "")
    wanted = wanted or full
    fix = fix or _fix(block, key, value, wanted)
    fix = fix or f"leave it out for the default, {show(field.default)}"
    return f"{BLOCK}.{name}: got {show(value)}; wanted {wanted}; fix: {fix}"


def _fix(block: type[BaseModel], key: str, value: object, wanted: str) -> str:
    if isinstance(value, str):
        words = re.findall(r'"([a-z_]+)"', wanted)
        if near := difflib.get_close_matches(value.strip().lower(), words, 1):
            return f'write "{near[0]}"'
        if re.fullmatch(r"\s*(-?[\d.]+|true|false|null)\s*", value):
            return f"write {value.strip()} without quotes, if that is in range"
    if isinstance(value, float) and value.is_integer():
        with contextlib.suppress(ValueError):  # also out of range, so no fix
            block(**{key: int(value)})
            return f"write {int(value)}"
    return ""


def show(value: object) -> str:
    """The value as JSON writes it, so that text and number look different."""
    try:
        return shorten(json.dumps(value, default=_plain))
    except ValueError as error:  # a number of more digits than Python writes
        return f"{type(value).__name__} ({str(error).partition(';')[0]})"


def _plain(value: object) -> object:
    return value.model_dump() if isinstance(value, BaseModel) else str(value)


def shorten(text: str) -> str:
    """The text, cut to a length that fits a message."""
    return text if len(text) <= 120 else text[:117] + "..."
