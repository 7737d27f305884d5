"""Run tests as other processors would: ``python -m tests.machines --only sse4 --threads 2 -- tests/window``.

A processor decides the order of the sums in a product, so its last bits. Libraries can be told to compute as
an older one does, and with more threads. A test that passes on one of these machines only knows where it
runs: its bound belongs to its dtype, or to a reference that is measured in the same run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

MACHINES: dict[str, dict[str, str]] = {
    "native": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "MKL_CBWR": "AVX2",
    },
    "sse4": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "MKL_CBWR": "COMPATIBLE",
    },
}
"""Environment of each machine. MKL_ENABLE_INSTRUCTIONS is for Intel's processors, MKL_CBWR for all."""

THREADS = ("1", "2")


def main() -> int:
    """Run the tests on each machine, one after another; the worst exit code of pytest."""
    parser = argparse.ArgumentParser(prog="python -m tests.machines", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MACHINES, default=[*MACHINES], metavar="NAME")
    parser.add_argument("--threads", nargs="+", default=THREADS, metavar="N")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    asked = parser.parse_args()
    codes = {}
    for name in asked.only:
        for threads in asked.threads:
            machine = f"{name}, threads: {threads}"
            print(f"== {machine}", flush=True)
            # threads that wait for one another sleep, so that a busy machine is no slower than it must be
            own = {"KAMERA_TEST_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
            environment = {**os.environ, **MACHINES[name], **own}
            tests = [sys.executable, "-m", "pytest", "-q", *asked.pytest]
            codes[machine] = subprocess.run(tests, env=environment).returncode
    for machine, code in codes.items():
        print(f"{'passed' if code == 0 else f'failed ({code})':12} {machine}")
    return max(codes.values())


if __name__ == "__main__":
    raise SystemExit(main())
