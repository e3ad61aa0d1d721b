"""``ds_tilemoe_report``: DeepSpeed's ``ds_report`` with the ops of this package in its table.

``ds_report`` lists the builders of DeepSpeed's own directory and knows no entry points, so ours are
put into its table in this process (deepspeed/env_report.py, ops/op_builder/all_ops.py).
"""

from __future__ import annotations


def register() -> None:
    """Puts our builders into DeepSpeed's table of ops, in this process."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    from ds_tilemoe.op_builder import ALL_BUILDERS

    for builder in ALL_BUILDERS:
        ALL_OPS[builder.NAME] = builder()


def main() -> None:
    """Entry point of ``ds_tilemoe_report``; takes the options of ``ds_report``."""
    register()
    from deepspeed import env_report

    from ds_tilemoe.op_builder import CUDATileMoEBuilder
    from ds_tilemoe.op_builder.cuda_library import device_obstacle

    env_report.cli_main()
    # The table says what can be built; the CUDA op is built on machines that cannot run it, too.
    print(f"{CUDATileMoEBuilder.NAME} on this machine: {device_obstacle() or 'it can run'}")


if __name__ == "__main__":
    main()
