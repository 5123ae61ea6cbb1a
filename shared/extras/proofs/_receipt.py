"""A receipt: what a model was made of, in digests that anyone can check."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from shared.process.files import digest
from shared.run.checkpoint import Checkpointer
from shared.run.checkpoint_files import MANIFEST, CheckpointError, checkpoints, verify

RECEIPT = "receipt.json"


def code() -> str:
    """A digest of the template that runs and of shared/: 16 hex digits."""
    files = [Path(sys.argv[0]), *sorted(Path(__file__).parents[2].rglob("*.py"))]
    text = b"".join(file.read_bytes() for file in files if file.is_file())
    return hashlib.sha256(text).hexdigest()[:16]


def made_of(saver: Checkpointer) -> dict[str, Any]:
    """Digests of a run's data, code and last checkpoint, whose manifest has that of the one before;
    and its hardware.
    """
    last = None
    if saver.latest and (saver.latest / MANIFEST).is_file():  # a user may have removed it
        last = digest(saver.latest / MANIFEST)["xxh3_128"]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "data": saver.facts["data"],
        "code": code(),
        "checkpoint": last,
        "hardware": device,
    }


def digests(saver: Checkpointer) -> str:
    """Lines for the card."""
    return "".join(f"\n- {name}: {value}" for name, value in made_of(saver).items())


def write_receipt(folder: Path, saver: Checkpointer) -> None:
    """Write receipt.json into a folder that is whole but for it: facts of the run, with masked
    settings, and the digests of the folder's files. Main rank.
    """
    files = {path.name: digest(path) for path in sorted(folder.iterdir()) if path.is_file()}
    receipt = {**saver.facts, **made_of(saver), "files": files}
    (folder / RECEIPT).write_text(json.dumps(receipt, indent=1), encoding="utf-8")


def problems(folder: Path, script: Path) -> list[str]:
    """What is not as the receipt in a folder says: files of it, the run's checkpoints, the code.

    Args:
        folder: final/ or merged/ of a run, or a copy of it.
        script: the template that trained it, as it is now.
    """
    receipt = json.loads((folder / RECEIPT).read_text(encoding="utf-8"))
    found = []
    for name, expected in receipt["files"].items():
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing")
        elif digest(path) != expected:
            found.append(f"{path} is not the file that was written")
    found += chain(folder.parent, receipt["checkpoint"])
    sys.argv[0] = str(script)
    if code() != receipt["code"]:
        found.append(
            f"{script} or shared/ is other code now ({receipt['code']} then, {code()} now)"
        )
    return found


def chain(run: Path, last: str | None) -> list[str]:
    """What is wrong with the checkpoints that a run still has; those that were pruned are no fault.

    Args:
        last: digest of the last manifest.
    """
    found = []
    there = checkpoints(run) if run.is_dir() else []
    if there and digest(there[-1] / MANIFEST)["xxh3_128"] != last:
        found.append(f"{there[-1]} is not the checkpoint that final/ came after")
    for folder in there:
        try:
            name, expected = verify(folder).get("before", ("", None))
        except CheckpointError as error:
            found.append(str(error))
            continue
        before = run / name / MANIFEST
        if name and before.is_file() and digest(before) != expected:
            found.append(f"{before.parent} is not the checkpoint that {folder.name} came after")
    return found
