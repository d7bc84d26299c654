"""The snippets of docs/clusters.md in their local forms: the draws of one process, whoever is lost."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.docs.pages import examples

ROOT = Path(__file__).parents[2]
OWN, LOKY, DASK, SLURM, MPI, RANKS = examples("clusters.md")
BEGIN = """
import os, signal, sys, threading, time, warnings
import torch
import dgm_infer as dgm
from dgm_infer.runs.folder import RunFolder
from tests.dgm_infer.runs.same import Well, assert_same

fibre, kernel = Well(1.0), dgm.HMC(n_steps=2)
warnings.simplefilter("ignore")

def during(act):
    # with the name of a shard, once it has a checkpoint of its draws, and is not finished
    def wait():
        while True:
            time.sleep(0.05)
            try:
                folder = RunFolder.open("watch", "runs/lens")
                for name in folder.names:
                    count = (folder.progress(name) or {"count": 0})["count"]
                    if 0 < count < folder.plan["draws"] / 2:
                        act(name)
                        return print("stopped one", flush=True)
            except dgm.errors.DgmInferError:
                pass
    threading.Thread(target=wait, daemon=True).start()
"""
OPTIONS = "kernel=kernel, warmup=20, draws={draws}, seed=3, progress=False, checkpoint_every=0.05, shards=4"
END = """
    assert not draws.interrupted
    whole = dgm.sample(fibre, chains=16, {options})
    assert_same(draws, whole)
    assert_same(dgm.collect("runs/lens"), whole)
    print("the same draws")
"""

pytestmark = pytest.mark.slow


def run(folder, snippet, *, draws=400, before="", command=(sys.executable,), name="script.py"):
    """Run a snippet of the page as a script: what it printed."""
    options = OPTIONS.format(draws=draws)
    snippet = snippet.replace("dgm.sample(fibre, chains=16,", f"dgm.sample(fibre, chains=16, {options},")
    body = textwrap.indent(before + snippet, "    ") + END.format(options=options)
    (folder / name).write_text(f"{BEGIN}\nif __name__ == '__main__':\n{body}")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*command, name], cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the same draws" in ended.stdout
    return ended


def needs(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


def test_processes_of_this_machine(tmp_path):
    run(tmp_path, OWN)


@needs("loky")
def test_loky(tmp_path):
    run(tmp_path, LOKY)


@needs("distributed")
def test_dask_with_a_worker_killed_in_the_middle(tmp_path):
    cluster = "from dask.distributed import LocalCluster\ncluster = LocalCluster(n_workers=2, threads_per_worker=1)\n"
    kill = "during(lambda name: os.kill(next(iter(cluster.workers.values())).pid, signal.SIGKILL))\n"
    snippet = re.sub(r'Client\(".*"\)', "Client(cluster)", DASK)
    assert snippet != DASK
    ended = run(tmp_path, snippet + "client.close()\ncluster.close()\n", draws=3000, before=cluster + kill)
    assert "stopped one" in ended.stdout


@needs("submitit")
def test_slurm_with_a_job_preempted(tmp_path):
    """Of submitit's own local form: a job is sent the signal of a preemption, and begins again."""
    kept = """
jobs, submit = {}, submitit.AutoExecutor.submit
def submitted(self, function, path, name, *arguments):
    jobs[name] = submit(self, function, path, name, *arguments)
    return jobs[name]
submitit.AutoExecutor.submit = submitted
def preempt(name):
    # Slurm sends the signal to the job's process, submitit's local form only to the one that began it
    with open("/proc/{0}/task/{0}/children".format(jobs[name]._process.pid)) as children:
        os.kill(int(children.read().split()[0]), signal.SIGUSR2)
during(preempt)
"""
    snippet = SLURM.replace('cluster="slurm"', 'cluster="local"').replace(
        "import submitit\n", f"import submitit\n{kept}"
    )
    ended = run(tmp_path, snippet, draws=3000)
    assert "stopped one" in ended.stdout, ended.stderr
    logs = "".join(path.read_text() for path in (tmp_path / "runs" / "log").glob("*.err"))
    logs += "".join(path.read_text() for path in (tmp_path / "runs" / "log").glob("*.out"))
    assert "preempted" in logs


MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))


@needs("mpi4py")
@pytest.mark.skipif(MPIEXEC is None, reason="no MPI is installed")
def test_mpi(tmp_path):
    run(tmp_path, MPI, command=(MPIEXEC, "-n", "3", sys.executable, "-m", "mpi4py.futures"))


def test_ranks_of_torchrun(tmp_path):
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    again = 'assert_same(dgm.resume("runs/lens", progress=False), draws)\n'
    ended = run(tmp_path, RANKS + again, command=command)
    assert ended.stdout.count("the same draws") == 2
