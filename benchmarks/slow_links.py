"""Training two replicas over a slow link: gradients at every step, or weights every some steps.

    sudo python benchmarks/slow_links.py                                # two network namespaces on this machine
    sudo python benchmarks/slow_links.py --links 100mbit --ways ddp h50

Two processes in network namespaces of their own, with half of the cores each. Their link is a pair of virtual cards, whose
rate `tc` limits, or for a delay two cards with a relay between them (needs root, Linux, and iproute2). For each way:
tokens/s, bytes that one replica sent for each step (the card's own counter), and the time lost, which is 1 minus its
tokens/s over those of a link without a limit.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from about import about, line

ROOT = Path(__file__).resolve().parents[1]
LINKS = ("none", "1gbit", "100mbit", "20mbit", "50ms")  # a rate, or the delay of each way
WAYS = {  # (flags, steps)
    "ddp": ("", 6),
    "h10": ("--sync_every 10", 40),
    "h50": ("--sync_every 50", 150),
    "h500": ("--sync_every 500", 500),
    "async h50": ("--sync_every 50 --sync_delay 20 --sync_fragments 4", 250),
    "async h50 bf16": ("--sync_every 50 --sync_delay 20 --sync_fragments 4 --sync_dtype bf16", 250),
}
NAMES = ("replica0", "replica1")


def shell(command: str) -> str:
    return subprocess.run(shlex.split(command), check=True, capture_output=True, text=True).stdout


def connect(link: str) -> None:
    """Two namespaces with one card each, and the link between them."""
    for name in NAMES:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        shell(f"ip netns add {name}")
    if link.endswith("ms"):
        relay(float(link.removesuffix("ms")) / 1000)
    else:
        shell(f"ip link add link0 netns {NAMES[0]} type veth peer name link0 netns {NAMES[1]}")
    for i, name in enumerate(NAMES):
        shell(f"ip -n {name} address add 10.77.0.{i + 1}/24 dev link0")
        shell(f"ip -n {name} link set link0 up")
        shell(f"ip -n {name} link set lo up")
        if link.endswith("bit"):
            shell(f"ip netns exec {name} tc qdisc add dev link0 root tbf rate {link} burst 256kb latency 200ms")


def relay(delay: float) -> None:
    """A card in each namespace, whose packets reach the other one `delay` seconds later. netem is not in every kernel."""
    tun_set_iff, tap, no_packet_information = 0x400454CA, 0x0002, 0x1000
    cards = []
    for name in NAMES:
        card = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(card, tun_set_iff, struct.pack("16sH", b"link0", tap | no_packet_information))
        shell(f"ip link set link0 netns {name} mtu 9000")
        cards.append(card)

    def receive(card: int, packets: deque[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):  # the namespace is gone
            while True:
                packet = os.read(card, 65536)
                packets.append((time.monotonic() + delay, packet))

    def send(card: int, packets: deque[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):
            while True:
                if not packets:
                    time.sleep(0.0005)
                    continue
                due, packet = packets.popleft()
                time.sleep(max(0.0, due - time.monotonic()))
                os.write(card, packet)

    for one, other in (cards, cards[::-1]):
        packets: deque[tuple[float, bytes]] = deque()
        threading.Thread(target=receive, args=(one, packets), daemon=True).start()
        threading.Thread(target=send, args=(other, packets), daemon=True).start()


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
        train += ["--save_steps", "100000", "--optim", "adamw", *shlex.split(flags)]
        env = os.environ | {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "link0"}
        before, processes, half = sent(), [], max(1, (os.cpu_count() or 1) // 2)
        for rank, name in enumerate(NAMES):
            cores = f"{rank * half}-{rank * half + half - 1}"
            where = ["ip", "netns", "exec", name, "taskset", "-c", cores, *command, "--machine_rank", str(rank), *train]
            processes.append(subprocess.Popen(where, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        for process in processes:
            _, said = process.communicate()
            if process.returncode:
                sys.exit(said[-2000:])
        rows = [json.loads(row) for row in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    speeds = [row["trained_tokens_per_second"] for row in rows if "trained_tokens_per_second" in row]
    middle = speeds[1:-1] or speeds  # the first is slow, and the last sends all once more
    return {"tokens_per_second": statistics.median(middle), "bytes_per_step": (sent() - before) / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", choices=LINKS, default=LINKS)
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
            connect(link)
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
