"""Under srun alone, who is who: Slurm says it in each process's environment, in other words than torchrun."""

import os
import re
import subprocess

NAMES = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}


def set_environment(refuse):
    """In a process that srun has started, and torchrun has not, set the variables that torchrun would have set.

    The environment is that of srun(1), "OUTPUT ENVIRONMENT VARIABLES". MASTER_ADDR and MASTER_PORT stay if they are
    set. If Slurm's tools are needed and cannot say the first host's name, refuse is called with a line that says so.
    """
    env = os.environ
    if "LOCAL_RANK" in env or "SLURM_STEP_ID" not in env:  # the batch script is no step: its processes have no rank
        return
    for name, slurms in NAMES.items():
        env[name] = env[slurms]
    env["LOCAL_WORLD_SIZE"] = str(tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])[int(env["SLURM_NODEID"])])
    env.setdefault("MASTER_PORT", str(10000 + int(env["SLURM_JOB_ID"]) % 20000))  # below those that systems pick from
    if "MASTER_ADDR" not in env:  # rank 0 is on the first host
        command = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
        try:
            hosts = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
        except (OSError, subprocess.SubprocessError) as error:
            return refuse(f"set MASTER_ADDR to the host of rank 0: {' '.join(command)} does not say it ({error})")
        env["MASTER_ADDR"] = hosts[0]


def tasks_per_node(text):
    """The number of tasks on each node: [2, 2, 1] for Slurm's "2(x2),1"."""
    return [int(tasks) for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
