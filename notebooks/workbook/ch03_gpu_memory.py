"""What a real GPU says about one training step: recorded on a machine that has one, shown where there is none.

    python -m workbook.ch03_gpu_memory        # on a machine with a GPU: writes data/gpu/memory.json

The device as a whole (what `nvidia-smi` shows), the allocator's reserve, and the tensors are three different sums.
"""

from __future__ import annotations

import datetime
import json
import threading
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from course_lib._words import readable_bytes
from course_lib.datasets import data_path
from course_lib.memory import measure_peak, predict_peak
from workbook.ch03_memory import OPTIMIZERS, image_net

BATCH_SIZE, SIDE, WIDTH = 64, 224, 64
RECORDING = data_path("claims.json").parent / "gpu" / "memory.json"


def record() -> dict[str, Any]:
    """Take steps of `image_net` on the first GPU, and say what each counter saw.

    Raises:
        RuntimeError: There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("a CUDA device is needed to record what one says; torch sees none")
    free_before, total = torch.cuda.mem_get_info()  # this makes the CUDA context
    model = image_net(WIDTH).cuda()
    optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
    images, labels = torch.ones(BATCH_SIZE, 3, SIDE, SIDE).cuda(), torch.zeros(BATCH_SIZE, dtype=torch.long).cuda()

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    step()
    measured = measure_peak(step, model=model, optimizer=optimizer)
    polled = _polled(step)
    on_cpu = (images.cpu(), labels.cpu())
    predicted = predict_peak(lambda: image_net(WIDTH), lambda: on_cpu, OPTIMIZERS["AdamW"])
    free_after, _ = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "date": datetime.date.today().isoformat(),
        "step": f"image_net({WIDTH}), {BATCH_SIZE} images of {SIDE} pixels a side, AdamW, fp32",
        "bytes": {
            "tensors, at the peak of the step (max_memory_allocated)": measured.peak_bytes,
            "the same, predicted without a GPU": predicted.peak_bytes,
            "tensors, highest of what was polled every 10 ms": polled,
            "tensors, after the step (memory_allocated)": allocated,
            "taken from the device by the allocator (memory_reserved)": reserved,
            "used on the device by everybody (what nvidia-smi shows)": total - free_after,
            "of these used before the first tensor": total - free_before,
        },
    }


def _polled(step: Any) -> int:
    """The highest `memory_allocated` that somebody sees who looks now and then."""
    seen, done = [0], threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            seen.append(torch.cuda.memory_allocated())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(10):
            step()
        torch.cuda.synchronize()
    finally:
        done.set()
        thread.join()
    return max(seen)


def shown(path: Path = RECORDING) -> str:
    """The recording in words, or how to make one."""
    if not path.exists():
        return "no GPU has been recorded: run `python -m workbook.ch03_gpu_memory` on a machine with one"
    recorded = json.loads(path.read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {version}" for name, version in recorded["versions"].items())
    lines = [f"{recorded['device']}, {versions}, {recorded['date']}: {recorded['step']}"]
    return "\n".join(lines + [f"{readable_bytes(count):>10}  {what}" for what, count in recorded["bytes"].items()])


if __name__ == "__main__":
    recording = record()
    RECORDING.parent.mkdir(exist_ok=True)
    RECORDING.write_text(json.dumps(recording, indent=1) + "\n", encoding="utf-8")
    print(shown())
