"""07 on a real Slurm of two nodes: whatever ends a job early, nothing is lost."""

import re

import pytest
from cluster import Cluster, Job
from helpers import (
    ROOT,
    WITNESS,
    copy_project,
    edit,
    equal,
    processes,
    wait_until,
    with_dropout,
)

FOLDER = ROOT / "07_slurm"
OPTIONS = ["--epochs", 2, "--batch-size", 16, "--save-every", 3]  # 80 steps of two ranks


@pytest.fixture(scope="module")
def cluster(hosts, tmp_path_factory):
    """A real Slurm on two hosts; tests that need it are skipped on machines without Slurm."""
    try:
        return Cluster(hosts, tmp_path_factory.mktemp("slurm"))
    except OSError as error:
        pytest.skip(f"no Slurm on this machine: {error}")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy with dropout and few digits, which trains slowly where there is a file "slow"."""
    project = tmp_path_factory.mktemp("slurm") / "a project"
    copy_project(project, FOLDER / "train.py", "run.sh")
    with_dropout(project)
    line = "indices = torch.frombuffer"
    sleep = "import time; time.sleep(0.5 if os.path.exists('slow') else 0)"
    edit(project, "common/data.py", (line, f"{sleep}\n        {line}"))
    return project


def submit(cluster, project, folder, *options, nproc=1, command="sbatch", **settings):
    """Submit a job of two nodes with nproc processes each."""
    command = [command, project / "run.sh", "--data-dir", project / "common", *OPTIONS, *options]
    settings = {"NPROC": str(nproc), "OMP_NUM_THREADS": "1"} | settings
    return Job(cluster, folder, *command, **settings)


@pytest.fixture(scope="module")
def undisturbed(cluster, project, tmp_path_factory):
    """The jobs of one and of two processes per node that nothing disturbs, by torchrun."""
    jobs = {}
    for nproc in (1, 2):
        folder = tmp_path_factory.mktemp("undisturbed")
        witness = {**WITNESS, "WITNESS": str(folder / "witness")}
        jobs[nproc] = submit(cluster, project, folder, nproc=nproc, **witness)
        assert jobs[nproc].finish() == ("COMPLETED", 0), jobs[nproc]
    return jobs


def words(options):
    return " ".join(map(str, options))


def epochs(text):
    """The epoch lines without their times."""
    return re.findall(r"^epoch \d/2  loss [\d.]+  accuracy [\d.]+ ", text, re.M)


def test_both_launchers_train_the_same(cluster, project, undisturbed, tmp_path):
    nproc, by_torchrun = 2, undisturbed[2]
    witness = {**WITNESS, "WITNESS": str(tmp_path / "witness")}
    by_srun = submit(
        cluster, project, tmp_path, nproc=nproc, command="bash", LAUNCHER="srun", **witness
    )
    assert by_srun.finish() == ("COMPLETED", 0), by_srun
    for job in (by_torchrun, by_srun):
        lines = (job.folder / "witness").read_text().splitlines()
        ranks = {(str(rank), str(2 * nproc)) for rank in range(2 * nproc)}
        assert {tuple(line.split()[:2]) for line in lines} == ranks, job
    assert epochs(by_srun.log()) == epochs(by_torchrun.log())
    assert len(epochs(by_srun.log())) == 2
    assert equal(by_torchrun.folder / "mnist.pt", tmp_path / "mnist.pt")


def test_by_hand_in_an_allocation(cluster, project, undisturbed, tmp_path):
    """The commands of the script's docstring, without run.sh."""
    docstring = (FOLDER / "train.py").read_text().split('"""')[1]
    allocate = re.search(r"\((salloc .*)\)", docstring)[1]
    commands = docstring.split("process:\n")[1].replace("\\\n", "").split("\n")
    by_torchrun, by_srun = [line for line in commands if "srun " in line]
    script = [*(line for line in commands if "export" in line)]
    script += [f"{by_torchrun} $OPTIONS --output torchrun.pt"]
    script += [f"{by_srun} $OPTIONS --output srun.pt --checkpoint c.pt"]
    script = "\n".join(script).replace("07_slurm/train.py", '"$PROJECT/train.py"')
    (tmp_path / "common").symlink_to(project / "common")
    settings = {"PROJECT": str(project), "OPTIONS": f"--data-dir common {words(OPTIONS)}"}
    settings["OMP_NUM_THREADS"] = "1"
    command = [*allocate.split(), "bash", "-euc", script]
    output = cluster.run(*command, folder=tmp_path, limit=600, **settings)
    assert epochs(output) == epochs(undisturbed[2].log()) * 2, output
    for name in ("torchrun.pt", "srun.pt"):
        assert equal(undisturbed[2].folder / "mnist.pt", tmp_path / name)


def test_a_failing_rank_fails_the_job(cluster, project, tmp_path):
    faulty = {**WITNESS, "WITNESS": str(tmp_path / "witness"), "FAULTY_RANK": "1"}
    job = submit(cluster, project, tmp_path, **faulty)
    state, code = job.finish()
    assert state == "FAILED" and code != 0, job
    assert "RuntimeError: planted by the test" in job.log(), job
    assert job.record()["Restarts"] == "0" and "requeueing" not in job.log(), job


def start(cluster, project, folder, *options, **settings):
    """Submit a job that trains slowly, and return when it has saved a checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "slow").touch()
    job = submit(cluster, project, folder, *options, **settings)
    job.wait(lambda _: (folder / "checkpoint.pt").exists())
    return job


def check_resumes(job, undisturbed):
    """Requeued, a job resumes where it was stopped, and ends as if nothing had disturbed it."""
    (job.folder / "slow").unlink(missing_ok=True)
    job.start_again()
    assert job.finish() == ("COMPLETED", 0), job
    first, again = job.log().split(f"job {job.id} on ")[1:]
    progress = r"after \d of 2 epochs and \d+ of 1260 images"
    stopped = re.search(f"^stopped ({progress}); rerun the same command to resume$", first, re.M)
    assert f"\nresuming from checkpoint.pt, {stopped[1]}\n" in again, job
    assert equal(undisturbed.folder / "mnist.pt", job.folder / "mnist.pt")


def test_preempted(cluster, project, undisturbed, tmp_path):
    """With a grace time rank 0 requeues the job, without one Slurm does."""
    jobs = [
        start(cluster, project, tmp_path / partition, SBATCH_PARTITION=partition, LAUNCHER=launcher)
        for partition, launcher in (("grace", "torchrun"), ("main", "srun"))
    ]
    urgent = ["--partition=urgent", "--exclusive", "--nodes=2", "--wrap=true"]
    assert Job(cluster, tmp_path, "sbatch", *urgent).finish() == ("COMPLETED", 0)
    requeued_by_rank_0 = [f"\nrequeueing job {job.id}\n" in job.log() for job in jobs]
    assert requeued_by_rank_0 == [True, False], jobs
    for job in jobs:
        check_resumes(job, undisturbed[1])


def test_out_of_time(cluster, project, undisturbed, tmp_path):
    """Slurm looks every 30 s, and sends the signal early rather than late: after 20 to 50 s."""
    settings = {"LAUNCHER": "srun", "SBATCH_TIMELIMIT": "1", "SBATCH_SIGNAL": "TERM@10"}
    job = start(cluster, project, tmp_path, **settings)
    job.wait(lambda record: record["JobState"] == "PENDING")
    assert f"\nrequeueing job {job.id}\n" in job.log(), job
    cluster.run("scontrol", "update", f"jobid={job.id}", "TimeLimit=10")
    check_resumes(job, undisturbed[1])


def test_requeued_by_its_user(cluster, project, undisturbed, tmp_path):
    job = start(cluster, project, tmp_path, LAUNCHER="srun")
    cluster.run("scontrol", "requeue", job.id)
    check_resumes(job, undisturbed[1])


def test_a_node_is_lost(cluster, project, undisturbed, tmp_path):
    job = start(cluster, project, tmp_path)
    cluster.run("scontrol", "update", "nodename=h1", "state=down", "reason=test")
    try:
        job.wait(lambda record: record["JobState"] == "PENDING")
        wait_until(lambda: not processes(str(tmp_path)))  # of the job's first run, on both nodes
    finally:
        cluster.run("scontrol", "update", "nodename=h1", "state=resume")
    check_resumes(job, undisturbed[1])


def test_cancelled(cluster, project, undisturbed, tmp_path):
    """It saves and is not requeued; the same command resumes it."""
    job = start(cluster, project, tmp_path)
    cluster.run("scancel", job.id)
    job.wait(lambda record: record["JobState"] == "CANCELLED")
    assert "\nstopped after " in job.log() and "requeueing" not in job.log(), job
    (tmp_path / "slow").unlink()
    again = submit(cluster, project, tmp_path)
    assert again.finish() == ("COMPLETED", 0), again
    assert "\nresuming from checkpoint.pt, after " in again.log(), again
    assert equal(undisturbed[1].folder / "mnist.pt", tmp_path / "mnist.pt")


def test_selftest_under_the_same_batch_script(cluster, tmp_path):
    settings = {"SCRIPT": "04_ddp_torchrun/selftest.py", "NPROC": "2", "OMP_NUM_THREADS": "1"}
    output = f"--output={tmp_path}/%x-%j.log"
    job = Job(cluster, ROOT, "sbatch", output, "07_slurm/run.sh", **settings)
    job.folder = tmp_path
    assert job.finish() == ("COMPLETED", 0), job
    assert re.search(r"^OK: all checks passed on 4 ranks on (h0, h1|h1, h0)$", job.log(), re.M), job


def test_a_bad_option_is_one_line(cluster, project, tmp_path):
    job = Job(cluster, tmp_path, "sbatch", project / "run.sh", "--epochs", 0)
    assert job.finish() == ("FAILED", 2), job
    error = "train.py: error: argument --epochs: must be above 0, not 0"
    assert job.log().splitlines() == ["usage: train.py [options]", error]


def test_the_header_is_read_by_slurm(cluster, tmp_path):
    """Slurm's own record of a held job has what the header says."""
    job = Job(cluster, tmp_path, "sbatch", "--hold", FOLDER / "run.sh")
    record = job.record()
    cluster.run("scancel", job.id)
    expected = {"JobName": "mnist", "Requeue": "1", "NumNodes": "2-2", "CPUs/Task": "2"}
    expected |= {"TimeLimit": "01:00:00", "MinMemoryNode": "3G", "NtasksPerN:B:S:C": "1:0:*:*"}
    expected |= {"StdOut": str(tmp_path / f"mnist-{job.id}.log")}
    assert {name: record[name] for name in expected} == expected
