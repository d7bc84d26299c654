"""A power cut: what a disk holds, without what the system has not written to it yet, has the last checkpoint."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dgm_infer as dgm
from tests.dgm_infer.runs import same

ROOT = Path(__file__).resolve().parents[3]
CUTS = 20

SCRIPT = """
import json, os, sys, torch, dgm_infer as dgm
from dgm_infer.runs.store import Writer
from tests.dgm_infer.runs.same import Well
torch.set_num_threads(1)
write, log = Writer.write, os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND)
def written(self, records):
    write(self, records)
    if "progress" in records:
        os.write(log, f"{json.loads(records['progress'])['count']}\\n".encode())
Writer.write = written
dgm.sample(Well(1.0), dgm.HMC(n_steps=2), chains=4, warmup=15, draws=10**5, seed=7, progress=False, run=sys.argv[1],
           checkpoint_every=0.03)
"""


@pytest.fixture
def mounted(tmp_path):
    """Mounts the image of a disk, whose files the system writes as late as it likes."""
    folders = []

    def mount(image):
        folder = tmp_path / f"mounted-{len(folders)}"
        folder.mkdir()
        found = subprocess.run(["mount", "-o", "loop,noauto_da_alloc", image, folder], capture_output=True)
        if found.returncode != 0:
            pytest.skip(f"cannot mount a file: {found.stderr.decode()}")
        folders.append(folder)
        return folder

    yield mount
    for folder in reversed(folders):
        subprocess.run(["umount", folder], capture_output=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mkfs.ext4") is None, reason="needs a file system of its own")
def test_a_power_cut_leaves_the_last_checkpoint(tmp_path, mounted):
    disk, log = tmp_path / "disk.img", tmp_path / "log"
    disk.write_bytes(bytes(2**26))
    subprocess.run(["mkfs.ext4", "-q", disk], check=True)
    log.touch()
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py", mounted(disk) / "run", log],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    try:
        while len(log.read_text().split()) < 5:
            assert process.poll() is None
            time.sleep(0.1)
        for cut in range(CUTS):
            time.sleep(0.1 + 0.02 * cut)
            # a process that is at work would change the disk while it is copied
            os.kill(process.pid, signal.SIGSTOP)
            shutil.copyfile(disk, tmp_path / "cut.img")
            known = int(log.read_text().split()[-1])
            os.kill(process.pid, signal.SIGCONT)
            folder = mounted(tmp_path / "cut.img")
            assert dgm.collect(folder / "run", same.Well(1.0)).shape[1] >= known > 0
            subprocess.run(["umount", folder], check=True)
    finally:
        process.kill()
        process.wait()
