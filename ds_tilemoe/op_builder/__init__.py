"""DeepSpeed op builders of this package; nothing is compiled before ``load()``."""

from ds_tilemoe.op_builder.cpu import CPUTileMoEBuilder

__all__ = ["ALL_BUILDERS", "CPUTileMoEBuilder"]

ALL_BUILDERS = (CPUTileMoEBuilder,)
