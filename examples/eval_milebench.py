"""MileBench under reuse: re-prefill, blind reuse and a rank-16 patch answer every item.

    python examples/eval_milebench.py
    python examples/eval_milebench.py --model Qwen/Qwen2.5-VL-7B-Instruct --data MileBench --limit 20

Without options it runs on the backbone that ships with Kamera and a small set of its own world.
"""

import argparse
import tempfile

from kamera import Backbone
from kamera.eval.tasks import MileBench, run_task
from kamera.testbed.benchmarks import write_milebench

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="model directory or hub name (default: the shipped backbone)")
parser.add_argument("--data", help="the folder of the datasets (default: a generated set)")
parser.add_argument("--limit", type=int, default=6, help="samples of each dataset")
args = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    backbone = Backbone.from_pretrained(args.model or "testbed")
    data = args.data or write_milebench(folder, episodes=1)
    results = run_task(backbone, MileBench(), data, f"{folder}/out", limit=args.limit)
for arm in results.arms:
    print(f"{arm.arm:>10}  official {arm.summary.official:.2f}  answers as re-prefill {arm.agreement:.2f}")
