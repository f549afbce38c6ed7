"""A Slurm cluster on the two hosts of hosts.py: real munge, slurmctld and slurmd, with all their files in one folder.

Nothing of this machine's own Slurm or munge is read or changed, and all of it ends with the hosts. It needs root, as
Slurm's daemons do, and slurm-wlm and munge.
"""

import os
import shutil
import subprocess
import time

from helpers import clean_environment, wait_until
from hosts import ADDRESSES, PATH

CONFIGURATION = """
ClusterName=test
SlurmctldHost=h0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=0
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=h0,h1 CPUs=4 RealMemory=6000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=grace Nodes=ALL MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10
"""
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL"}


class Cluster:
    def __init__(self, hosts, folder):
        """Start it on these hosts; raises OSError with the reason if that cannot be."""
        for tool in ("munged", "slurmctld", "slurmd", "sbatch", "scontrol"):
            if not shutil.which(tool, path=PATH):
                raise OSError(f"there is no {tool} here")
        if os.geteuid() != 0:
            raise OSError("its daemons must be root's")
        self.hosts, self.folder, self.output = hosts, folder, open(folder / "daemons.log", "w")
        folder.chmod(0o755)
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        files = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "seed", "log")]
        self.start("h0", "munged", "--foreground", "--force", *files, f"--socket={folder}/munge.socket")
        self.start("h0", "slurmctld", "-D", "-i")
        for host in ADDRESSES:
            (folder / f"spool-{host}").mkdir()
            self.start(host, "slurmd", "-D", "-N", host)
        try:
            wait_until(lambda: self.nodes() == {"idle"}, limit=20)
        except AssertionError:
            raise OSError(f"its nodes did not come up: {(folder / 'daemons.log').read_text()[-2000:]}") from None

    def environment(self, **settings):
        return {**clean_environment(), "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf"), **settings}

    def start(self, host, *command):
        command, nothing = self.hosts.on(host, self.folder, *command), subprocess.DEVNULL
        subprocess.Popen(command, env=self.environment(), stdin=nothing, stdout=self.output, stderr=self.output)

    def ask(self, *command, folder=None, check=True, **settings):
        """Run a command on h0, as a user does; return what it prints."""
        command = self.hosts.on("h0", folder or self.folder, *command)
        environment = self.environment(**settings)
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert not check or result.returncode == 0, (command, result)
        return result.stdout

    def nodes(self):
        """The states of the nodes, each once."""
        return set(self.ask("sinfo", "--noheader", "--format=%T", "--partition=main", check=False).split())


class Job:
    def __init__(self, cluster, folder, *command, **settings):
        """Submit a job from a folder, by this command, with these settings in its environment."""
        self.cluster, self.folder = cluster, folder
        self.id = cluster.ask(*map(str, command), folder=folder, **settings).split()[-1]

    def __repr__(self):
        return f"{self.record()}\n{self.log()}"

    def record(self):
        """What Slurm knows of it: by name, as `scontrol show job` says it."""
        words = self.cluster.ask("scontrol", "show", "job", "--oneliner", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def log(self):
        return "".join(path.read_text() for path in self.folder.glob(f"*-{self.id}.log"))

    def wait(self, condition, limit=60):
        """Wait until a condition holds, which is asked with the job's record."""
        end = time.monotonic() + limit
        while not condition(self.record()):
            assert time.monotonic() < end, self
            time.sleep(0.2)

    def finish(self, limit=90):
        """Wait for its end; return its state and its exit code."""
        self.wait(lambda record: record["JobState"] in FINAL, limit)
        code, _, signal = self.record()["ExitCode"].partition(":")
        assert signal == "0", self
        return self.record()["JobState"], int(code)

    def start_again(self):
        """Wait until it was in the queue again, and runs again when Slurm's own time for that is over."""
        self.wait(lambda record: record["Restarts"] == "1" and record["JobState"] != "PENDING")
