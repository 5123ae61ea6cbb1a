"""Training two replicas over a slow link: gradients at every step, or weights every some steps.

    sudo python benchmarks/slow_links.py                                # two network namespaces on this machine
    sudo python benchmarks/slow_links.py --links 100mbit --ways ddp h50

Two processes in network namespaces of their own, joined by a pair of virtual cards whose rate and delay `tc` limits (needs
root, Linux, and iproute2). For each way: tokens/s of the median step, bytes that one replica sent for each step (the
card's own counter), and the time lost, which is 1 minus its tokens/s over those of a link without a limit.
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from about import about, line

ROOT = Path(__file__).resolve().parents[1]
LINKS = {"none": "", "1gbit": "rate 1gbit", "100mbit": "rate 100mbit", "20mbit": "rate 20mbit", "50ms": "delay 50ms"}
WAYS = {  # (flags, steps)
    "ddp": ("", 6),
    "ddp bf16": ("--ddp_comm_hook bf16", 6),
    "h10": ("--sync_every 10", 40),
    "h50": ("--sync_every 50", 150),
    "h500": ("--sync_every 500", 1000),
    "async h50": ("--sync_every 50 --sync_delay 20 --sync_fragments 4", 150),
    "async h50 bf16": ("--sync_every 50 --sync_delay 20 --sync_fragments 4 --sync_dtype bf16", 150),
}
NAMES = ("replica0", "replica1")


def shell(command: str) -> str:
    return subprocess.run(shlex.split(command), check=True, capture_output=True, text=True).stdout


def connect(link: str) -> None:
    """Two namespaces with one card each; `link` is what tc's netem is told."""
    for name in NAMES:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        shell(f"ip netns add {name}")
    shell(f"ip link add link0 netns {NAMES[0]} type veth peer name link0 netns {NAMES[1]}")
    for i, name in enumerate(NAMES):
        shell(f"ip -n {name} address add 10.77.0.{i + 1}/24 dev link0")
        shell(f"ip -n {name} link set link0 up")
        shell(f"ip -n {name} link set lo up")
        if link:
            shell(f"ip netns exec {name} tc qdisc add dev link0 root netem limit 100000 {link}")


def sent() -> int:
    """Bytes that the first replica has sent."""
    return int(shell(f"ip netns exec {NAMES[0]} cat /sys/class/net/link0/statistics/tx_bytes"))


def measure(way: str, model: str) -> dict[str, float]:
    """One training over the link that is there."""
    flags, steps = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        command += [str(ROOT / "accelerate_configs/multi_node_ddp.yaml"), "--num_machines", "2", "--num_processes", "2"]
        command += ["--mixed_precision", "no", "--main_process_ip", "10.77.0.1", "--main_process_port", "29500"]
        train = [str(ROOT / "templates/pretrain.py"), "--output_dir", folder, "--report_to", "none", "--model_preset", model]
        train += ["--max_steps", str(steps), "--logging_steps", "1", "--eval_samples", "2", "--eval_steps", "100000"]
        train += ["--global_batch_size", "8", "--per_device_train_batch_size", "4", "--seq_length", "128"]
        train += ["--save_steps", "100000", *shlex.split(flags)]
        env = os.environ | {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "link0", "OMP_NUM_THREADS": "1"}
        before, processes = sent(), []
        for rank, name in enumerate(NAMES):
            where = ["ip", "netns", "exec", name, *command, "--machine_rank", str(rank), *train]
            processes.append(subprocess.Popen(where, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        for process in processes:
            _, said = process.communicate()
            if process.returncode:
                sys.exit(said[-2000:])
        rows = [json.loads(row) for row in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    speeds = [row["trained_tokens_per_second"] for row in rows if "trained_tokens_per_second" in row]
    return {"tokens_per_second": statistics.median(speeds[1:] or speeds), "bytes_per_step": (sent() - before) / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--model", default="3M", help="a --model_preset of pretrain.py")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    if os.geteuid() or not shutil.which("tc"):
        sys.exit("this needs root, and iproute2's `ip` and `tc`")
    found: dict[str, Any] = about() | {"model": args.model, "links": {}}
    print(line(found))
    print("| link | way | tokens/s | lost | MB sent a step |\n|---|---|---|---|---|")
    try:
        for link in dict.fromkeys(["none", *args.links]):
            connect(LINKS[link])
            for way in args.ways:
                row = measure(way, args.model)
                found["links"].setdefault(link, {})[way] = row
                lost = 1 - row["tokens_per_second"] / found["links"]["none"][way]["tokens_per_second"]
                mb = row["bytes_per_step"] / 1e6
                print(f"| {link} | {way} | {row['tokens_per_second']:,.0f} | {lost:.0%} | {mb:.3f} |", flush=True)
                args.output.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


if __name__ == "__main__":
    main()
