"""What the command line's files say about a run: sizes, dtype, DeepSpeed's settings and ours.

No torch: a wrong file is refused before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.model_config import ModelConfig
from demo.options import wrong
from demo.outputs import need_writable
from ds_tilemoe.config import TileOverlapConfig, load_config, split_config
from ds_tilemoe.errors import ConfigError

DEMO = Path(__file__).parent
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # ours to torch's


@dataclass(frozen=True)
class Settings:
    """What the two configuration files say.

    Attributes:
        sizes: of the model.
        dtype: of weights and logits, a key of DTYPES; None where nothing chooses one.
        ds_config: what DeepSpeed gets.
        block: what ds_tilemoe gets.
    """

    sizes: ModelConfig
    dtype: str | None
    ds_config: dict[str, Any]
    block: TileOverlapConfig


def checked(args: argparse.Namespace) -> Settings:
    """The settings of ``infer.py``'s command line, which goes together as far as files tell.

    Raises:
        InputError: names the option.
        ModelConfigError, ConfigError: as :func:`read_settings`.
    """
    read = {
        "--text": args.text,
        "--deepspeed_config": args.deepspeed_config,
        "--model-config": args.model_config,
    }
    need_writable(written(args), {option: Path(name) for option, name in read.items() if name})
    settings = read_settings(args.model_config, args.deepspeed_config, args.dtype)
    most = settings.sizes.max_positions - 1  # the last byte written is not read; two are
    if args.max_new_tokens > most:
        wanted = f"at most {most}, for which the model has room"
        fix = "lower it, or raise max_positions with --model-config"
        raise wrong("--max-new-tokens", args.max_new_tokens, wanted, fix)
    if args.trace is not None and not settings.block.enabled:
        got, wanted = "a file, and tile_overlap.enabled is false", "swapped layers, which it shows"
        raise wrong("--trace", got, wanted, "leave one of them out")
    return settings


def written(args: argparse.Namespace) -> dict[str, tuple[Path, tuple[str, ...]]]:
    """Option -> file to write and its endings, as ``demo.outputs`` wants them."""
    return {} if args.trace is None else {"--trace": (args.trace, (".json", ""))}


def read_settings(
    model_config: str | None, deepspeed_config: str | None, dtype: str | None
) -> Settings:
    """Read and check both files; None stands for the demo's sizes and for all defaults.

    Args:
        model_config, deepspeed_config: paths.
        dtype: what takes the place of the dtype that the ds_config asks for.

    Raises:
        ModelConfigError: see :class:`ModelConfig`.
        ConfigError: as :func:`ds_tilemoe.config.split_config`, or a wrong dtype.
    """
    sizes = ModelConfig.load(DEMO / "config.json" if model_config is None else model_config)
    ds_config: dict[str, Any]
    if deepspeed_config is None:
        ds_config, block = {}, load_config(None)
    else:
        ds_config, block = split_config(deepspeed_config)
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & ds_config.keys():
        ds_config["train_micro_batch_size_per_gpu"] = 1  # initialize() insists on one
    asked = take_dtype(ds_config)
    return Settings(sizes, dtype or asked, ds_config, block)


def take_dtype(ds_config: dict[str, Any]) -> str | None:
    """The dtype that a ds_config asks for, a key of DTYPES or None; taken out of it.

    DeepSpeed's bf16 and fp16 blocks want an optimizer where there are MoE layers, and its
    data_types.param_dtype wants one of those blocks. A model that is cast beforehand needs none.

    Raises:
        ConfigError: it asks for what is no dtype, or for two.
    """
    asked = {}
    for key, dtype in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        section = ds_config.pop(key, {})
        enabled = section.get("enabled", False) if isinstance(section, dict) else None
        if not isinstance(enabled, bool):
            raise ConfigError(
                f'{key}: got {json.dumps(section)}; wanted a block; fix: {{"enabled": true}}'
            )
        if enabled:
            asked[key] = dtype
    kinds = ds_config.get("data_types")
    wanted = kinds.pop("param_dtype", None) if isinstance(kinds, dict) else None
    if wanted is not None:
        names = {name: ours for ours, its in DTYPES.items() for name in (ours, its)}
        if wanted not in names:
            raise ConfigError(
                f"data_types.param_dtype: got {json.dumps(wanted)}; wanted one of {list(DTYPES)};"
                " fix: change it"
            )
        asked["data_types.param_dtype"] = names[wanted]
    if len(set(asked.values())) > 1:
        raise ConfigError(
            f"{' and '.join(asked)}: got {' and '.join(asked.values())}; wanted one dtype; fix:"
            " remove one"
        )
    return next(iter(asked.values()), None)
