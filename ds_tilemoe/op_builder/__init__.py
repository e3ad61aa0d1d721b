"""DeepSpeed op builders of this package; nothing is compiled before ``load()``."""

from ds_tilemoe.op_builder.cpu import CPUTileMoEBuilder
from ds_tilemoe.op_builder.cuda import CUDATileMoEBuilder

__all__ = ["ALL_BUILDERS", "CPUTileMoEBuilder", "CUDATileMoEBuilder"]

ALL_BUILDERS = (CPUTileMoEBuilder, CUDATileMoEBuilder)
