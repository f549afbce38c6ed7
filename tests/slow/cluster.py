"""A Slurm cluster on the two hosts of hosts.py: real munge, slurmctld and slurmd.

All its files are in one folder, this machine's own Slurm is neither read nor changed, and the
daemons end with the hosts. It needs root, slurm-wlm and munge.
"""

import os
import time

from hosts import ADDRESSES, Daemons

CONFIGURATION = """
ClusterName=test
SlurmctldHost=h0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5 # a requeued job waits as long, not 120 s
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
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=h0,h1 CPUs=4 RealMemory=6000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=grace Nodes=ALL MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10
"""
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL"}


class Cluster(Daemons):
    def __init__(self, hosts, folder):
        """Start it on these hosts; raises OSError with the reason if that is not possible."""
        tools = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
        super().__init__(hosts, folder, tools, SLURM_CONF=str(folder / "slurm.conf"))
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
        socket = f"--socket={folder}/munge.socket"
        self.start("h0", "munged", "--foreground", "--force", *files, socket)
        self.start("h0", "slurmctld", "-D", "-i")
        for host in ADDRESSES:
            (folder / f"spool-{host}").mkdir()
            self.start(host, "slurmd", "-D", "-N", host)
        self.wait_until_up(lambda: self.node_states() == {"idle"})

    def node_states(self):
        return set(self.run("sinfo", "--noheader", "--format=%T", "--partition=main").split())


class Job:
    def __init__(self, cluster, folder, *command, **settings):
        """Submit a job from a folder, with these settings in the environment."""
        self.cluster = cluster
        self.folder = folder
        self.id = cluster.run(*command, folder=folder, **settings).split()[-1]

    def __repr__(self):
        return f"{self.record()}\n{self.log()}"

    def record(self):
        """The fields of `scontrol show job`, by name."""
        words = self.cluster.run("scontrol", "show", "job", "--oneliner", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def log(self):
        return "".join(path.read_text() for path in self.folder.glob(f"*-{self.id}.log"))

    def wait(self, condition, limit=300):
        """Wait until a condition holds, which is called with the job's record."""
        end = time.monotonic() + limit
        while not condition(self.record()):
            assert time.monotonic() < end, self
            time.sleep(0.2)

    def finish(self, limit=600):
        """Wait for its end; return its state and its exit code."""
        self.wait(lambda record: record["JobState"] in FINAL, limit)
        code, _, signal = self.record()["ExitCode"].partition(":")
        assert signal == "0", self
        return self.record()["JobState"], int(code)

    def start_again(self):
        """Wait until it has been requeued and runs again."""
        self.wait(lambda record: record["Restarts"] == "1" and record["JobState"] != "PENDING")
