"""MM-NIAH under reuse: re-prefill, blind reuse and a rank-16 patch answer every item.

    python examples/eval_mm_niah.py
    python examples/eval_mm_niah.py --model Qwen/Qwen2.5-VL-7B-Instruct --data MM-NIAH --limit 20

Without options it runs on the backbone that ships with Kamera and a small set of its own world.
"""

import argparse
import tempfile

from kamera import Backbone
from kamera.eval.tasks import MMNiah, run_task
from kamera.testbed.benchmarks import write_mm_niah

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="model directory or hub name (default: the shipped backbone)")
parser.add_argument("--data", help="the folder that holds mm_niah_val (default: a generated set)")
parser.add_argument("--limit", type=int, default=6, help="samples of each subtask")
args = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    backbone = Backbone.from_pretrained(args.model or "testbed")
    task = MMNiah(bare=args.model is None)  # the shipped backbone reads questions, not instructions
    data = args.data or write_mm_niah(folder, episodes=1)
    results = run_task(backbone, task, data, f"{folder}/out", limit=args.limit)
for arm in results.arms:
    print(f"{arm.arm:>10}  accuracy {arm.summary.mean:.2f}  answers as re-prefill {arm.agreement:.2f}")
