"""Producer against torch._grouped_mm and CUTLASS's grouped GEMM on one GPU, one interleaved run.

Libraries: `make -C tests/gpu`. Every variant is compared with an fp32 product first; what fails is
not timed. Appends JSON lines to --out. Legend: M rows, N columns of the output, K depth, E experts.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import datetime
import json
import random
import statistics
import subprocess
from pathlib import Path

import torch
import torch.nn.functional as F

# (M, N, K, E): down projections that the producer has a target for, and the GEMM 1 of some layers.
DOWN_SHAPES = [
    (16384, 8192, 2048, 16),
    (16384, 4096, 1536, 16),
    (16384, 1024, 4096, 16),
    (16384, 512, 2048, 16),
    (16384, 8192, 2048, 64),
]
UP_SHAPES = [(16384, 2048, 8192, 16), (16384, 1536, 4096, 16), (16384, 2048, 512, 16)]
TOLERANCE = 8e-3  # bf16 result against the fp32 product of the same inputs
ACTIVATIONS = {"none": lambda x: x, "gelu": F.gelu, "silu": F.silu, "relu": F.relu}


@dataclasses.dataclass(frozen=True)
class Ours:
    """One way to run the producer; `group` and `sms_left` None or 0 mean the usual."""

    tile_n: int = 256
    gated: bool = False
    activation: str = "none"
    bias: bool = False
    flags: bool = True
    group: int | None = None
    sms_left: int = 0


def pointers(tensors):
    return (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])


class Bench:
    """Inputs of one shape and its variants by name, each `run(i)` for timed run i."""

    def __init__(self, libs, shape, runs, variants: dict[str, Ours]):
        m, n, k, e = shape
        self.libs, self.shape, self.runs, self.specs = libs, shape, runs, variants
        self.stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        self.a_source = self.a.clone()
        # The second half serves gated variants as up projections.
        self.b = torch.randn(2, e, n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
        self.bias = torch.randn(2, e, n, device="cuda", dtype=torch.bfloat16)
        self.outputs, self.variants, self.resets = {}, {}, []
        for name, spec in variants.items():
            self.add_ours(name, spec)
        self.add_peers()

    def output(self, name):
        m, n, _, _ = self.shape
        self.outputs[name] = torch.full((m, n), float("nan"), device="cuda", dtype=self.a.dtype)
        return ctypes.c_void_p(self.outputs[name].data_ptr())

    def add_ours(self, name, spec):
        m, n, k, e = self.shape
        lib, grid = self.libs["ours"], self.sms - spec.sms_left
        halves = 2 if spec.gated else 1
        group = spec.group or lib.bench_group_bands(spec.tile_n, int(spec.gated), n, grid)
        problem = ctypes.c_void_p(
            lib.bench_create(
                0, spec.tile_n, int(spec.gated), e, (ctypes.c_int * e)(*[m // e] * e), n, k,
                ctypes.c_void_p(self.a.data_ptr()), pointers(list(self.b[:halves].flatten(0, 1))),
                pointers(list(self.bias[:halves].flatten(0, 1))) if spec.bias else None,
                self.output(name), list(ACTIVATIONS).index(spec.activation), group, self.runs + 4,
            )
        )  # fmt: skip
        self.variants[name] = lambda i: lib.bench_run(
            problem, i, int(spec.flags), grid, self.stream
        )
        self.resets.append(lambda: lib.bench_reset(problem, self.stream))

    def add_peers(self):
        m, n, k, e = self.shape
        rows = (ctypes.c_int * e)(*[m // e] * e)
        first = (ctypes.c_int64 * e)(*[i * (m // e) for i in range(e)])
        offs = torch.arange(1, e + 1, device="cuda", dtype=torch.int32) * (m // e)
        lib = self.libs["cutlass"]
        for variant, name in enumerate(("cutlass_1x1", "cutlass_2x1")):
            handle = ctypes.c_void_p(
                lib.cutlass_grouped_create(
                    variant, e, rows, first, n, k, ctypes.c_void_p(self.a.data_ptr()),
                    pointers(list(self.b[0])), self.output(name),
                )
            )  # fmt: skip
            self.variants[name] = lambda i, handle=handle: lib.cutlass_grouped_run(
                handle, self.stream
            )

        def torch_run(_):
            self.outputs["torch"] = torch._grouped_mm(self.a, self.b[0].transpose(1, 2), offs=offs)
            return 0

        self.variants["torch"] = torch_run

    def reset(self):
        for reset in self.resets:
            reset()

    def wanted(self, rows, spec):
        """fp32 [rows, N]."""
        m, n, _, e = self.shape
        result = torch.empty(len(rows), n, device="cuda")
        for i in range(e):
            mine = (rows // (m // e)) == i
            x = self.a[rows[mine]].float()
            halves = [
                x @ self.b[half, i].float().T + (self.bias[half, i].float() if spec.bias else 0)
                for half in range(2 if spec.gated else 1)
            ]
            result[mine] = ACTIVATIONS[spec.activation](halves[0])
            if spec.gated:
                result[mine] *= halves[1]
        return result

    def check(self):
        """Drops variants whose output is wrong; returns the errors."""
        errors = {}
        rows = torch.arange(0, self.shape[0], 37, device="cuda")
        self.reset()
        for name, run in list(self.variants.items()):
            code = run(0)
            torch.cuda.synchronize()
            out = self.outputs[name]
            wanted = self.wanted(rows, self.specs.get(name, Ours()))
            errors[name] = (
                ((out[rows].float() - wanted).norm(dim=1) / wanted.norm(dim=1)).max().item()
            )
            if code != 0 or not errors[name] <= TOLERANCE or not bool(torch.isfinite(out).all()):
                print(f"  {name}: WRONG, code {code}, error {errors[name]:.2e}: not timed")
                del self.variants[name]
        return errors

    def time(self):
        """us of every run, by variant; a round runs all variants in random order.

        A is written anew before each run, as the GEMM before this one would: all variants then find
        the L2 in the same state (the end of A in it, no weights), whatever ran before.
        """
        names = list(self.variants)
        times = {name: [] for name in names}
        self.reset()
        for name in names:
            self.variants[name](0)
            self.variants[name](1)
        for i in range(self.runs):
            pairs = []
            for name in random.sample(names, len(names)):
                # The GPU sleeps while the host prepares, so that no launch gap is timed.
                torch.cuda._sleep(300_000)
                self.a.copy_(self.a_source)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                self.variants[name](i + 2)
                end.record()
                pairs.append((name, begin, end))
            torch.cuda.synchronize()
            for name, begin, end in pairs:
                times[name].append(begin.elapsed_time(end) * 1e3)
        return times


def down_variants(groups, sms_left):
    variants = {
        "n256": Ours(),
        "n256_no_flag": Ours(flags=False),
        "n128": Ours(tile_n=128),
    }
    for left in sms_left:
        variants[f"n256_left{left}"] = Ours(sms_left=left)
        variants[f"n128_left{left}"] = Ours(tile_n=128, sms_left=left)
    variants |= {f"n256_group{g}": Ours(group=g) for g in groups}
    return variants


def up_variants():
    variants = {"none": Ours(flags=False), "bias": Ours(flags=False, bias=True)}
    for activation in ("gelu", "silu", "relu"):
        variants[f"bias_{activation}"] = Ours(flags=False, bias=True, activation=activation)
    variants["gated_silu"] = Ours(flags=False, gated=True, activation="silu")
    variants["gated_gelu"] = Ours(flags=False, gated=True, activation="gelu")
    return variants


def report(bench, errors, times, kind, common, out):
    m, n, k, e = bench.shape
    medians = {name: statistics.median(t) for name, t in times.items()}
    peers = [p for p in medians if p == "torch" or p.startswith("cutlass")]
    best = min(peers, key=medians.__getitem__)
    print(f"{kind} {m} x {n} x {k}, {e} experts; best peer {best} {medians[best]:.1f} us")
    for name in sorted(times, key=medians.__getitem__):
        ordered = sorted(times[name])
        p10, p90 = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        # Median over rounds of (peer / this): 1 = as fast as the better peer.
        ratio = statistics.median(p / q for p, q in zip(times[best], times[name], strict=True))
        print(
            f"  {name:16s} {medians[name]:8.1f} us  p10 {p10:8.1f}  p90 {p90:8.1f}"
            f"  of peer {ratio:.3f}  err {errors[name]:.1e}"
        )
        if out is not None:
            record = common | {
                "time": datetime.datetime.now(datetime.UTC).isoformat(), "gemm": kind,
                "variant": name, "gemm_m": m, "gemm_n": n, "gemm_k": k, "local_experts": e,
                "runs": len(ordered), "gemm_us": medians[name], "gemm_p10_us": p10,
                "gemm_p90_us": p90, "of_best_peer": ratio, "best_peer": best,
                "max_rel_err": errors[name],
            }  # fmt: skip
            with out.open("a") as file:
                file.write(json.dumps(record) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--libs", type=Path, required=True, help="folder of the .so files")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--groups", type=int, nargs="*", default=[], help="group_bands to try")
    parser.add_argument("--sms-left", type=int, nargs="*", default=[], help="SMs to leave free")
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False  # the check's products are fp32
    torch.cuda.init()
    libs = {
        "ours": ctypes.CDLL(str(args.libs / "libproducer_bench.so")),
        "cutlass": ctypes.CDLL(str(args.libs / "libcutlass_grouped.so")),
    }
    libs["ours"].bench_create.restype = ctypes.c_void_p
    libs["cutlass"].cutlass_grouped_create.restype = ctypes.c_void_p
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    common = {
        "schema": 1, "bench": "producer", "commit": args.commit, "ranks": 1, "seed": 0, "topk": 1,
        "gpu": torch.cuda.get_device_name(0), "driver": driver,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "dtype": "bfloat16", "routing": "balanced",
    }  # fmt: skip
    work = [("down", shape, down_variants(args.groups, args.sms_left)) for shape in DOWN_SHAPES]
    work += [("up", shape, up_variants()) for shape in UP_SHAPES]
    for kind, shape, variants in work:
        bench = Bench(libs, shape, args.runs, variants)
        errors = bench.check()
        report(bench, errors, bench.time(), kind, common, args.out)
        del bench
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
