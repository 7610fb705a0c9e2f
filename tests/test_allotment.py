"""Cores and memory of a process: those of its machine, or what its control groups leave of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.control_groups import limited

from ryzanstein.process import allotment

MIB = 2**20
MEMINFO = "MemTotal:       16384000 kB\nMemFree: 1 kB\nMemAvailable:    8192000 kB\n"
OWN = len(os.sched_getaffinity(0))
ASKED = """
import json
from ryzanstein.process.allotment import *
print(json.dumps([usable_cores(), whole_cores(), memory_bytes(), available_memory_bytes()]))
"""


class Machine:
    """A root directory with the files that the kernel has."""

    def __init__(self, root: Path, memberships: str, mounts: str) -> None:
        self.root = root
        self.write("proc/meminfo", MEMINFO)
        self.write("proc/self/cgroup", memberships)
        self.write("proc/self/mountinfo", mounts)

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


@pytest.fixture
def unified(tmp_path) -> Machine:
    """Version 2, as systemd mounts it."""
    return Machine(tmp_path, "0::/jobs/mine", "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate")


@pytest.fixture
def split(tmp_path) -> Machine:
    """Version 1, two controllers in one hierarchy, in a container whose own group is what is mounted."""
    mounts = (
        "31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs rw,mode=755\n"
        "32 31 0:29 /docker/c0ffee /sys/fs/cgroup/cpu,cpuacct ro master:11 - cgroup cgroup rw,cpu,cpuacct\n"
        "33 31 0:30 /docker/c0ffee /sys/fs/cgroup/mem\\040ory ro master:12 - cgroup cgroup rw,memory"
    )
    return Machine(tmp_path, "5:cpu,cpuacct:/docker/c0ffee\n4:memory:/docker/c0ffee/job\n1:name=systemd:/x", mounts)


def test_without_groups_the_machine_counts(tmp_path) -> None:
    machine = Machine(tmp_path, "", "")
    assert allotment.usable_cores(machine.root) == OWN
    assert allotment.granted_cores(machine.root) == float("inf")
    assert allotment.memory_bytes(machine.root) == 16_384_000 * 1024
    assert allotment.available_memory_bytes(machine.root) == 8_192_000 * 1024


def test_the_smallest_limit_on_the_way_up_counts(unified) -> None:
    group = "sys/fs/cgroup/jobs"
    unified.write(f"{group}/mine/cpu.max", "max 100000")
    unified.write(f"{group}/cpu.max", "50000 100000")
    unified.write("sys/fs/cgroup/other/cpu.max", "1000 100000")
    unified.write(f"{group}/mine/memory.max", 3 * MIB)
    unified.write(f"{group}/memory.max", 2 * MIB)
    assert allotment.usable_cores(unified.root) == 0.5
    assert allotment.whole_cores(unified.root) == 1
    assert allotment.memory_bytes(unified.root) == 2 * MIB
    unified.write(f"{group}/mine/cpu.max", "25000 100000")
    unified.write(f"{group}/mine/memory.max", MIB)
    assert allotment.usable_cores(unified.root) == 0.25
    assert allotment.memory_bytes(unified.root) == MIB


def test_a_quota_of_more_than_the_cores_changes_nothing(unified) -> None:
    unified.write("sys/fs/cgroup/jobs/cpu.max", "99900000 100000")
    assert allotment.usable_cores(unified.root) == OWN
    assert allotment.granted_cores(unified.root) == 999


def test_the_room_in_a_group_counts_cached_files_as_free(unified) -> None:
    group = "sys/fs/cgroup/jobs"
    unified.write(f"{group}/memory.max", 100 * MIB)
    unified.write(f"{group}/memory.current", 60 * MIB)
    unified.write(f"{group}/memory.stat", f"anon {20 * MIB}\ninactive_file {25 * MIB}\nactive_file {5 * MIB}")
    assert allotment.available_memory_bytes(unified.root) == 70 * MIB
    unified.write(f"{group}/mine/memory.max", 50 * MIB)
    unified.write(f"{group}/mine/memory.current", 60 * MIB)
    assert allotment.available_memory_bytes(unified.root) == 0


def test_version_1_in_a_container_is_read_where_it_is_mounted(split) -> None:
    split.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", 150_000)
    split.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", 100_000)
    split.write("sys/fs/cgroup/mem ory/memory.limit_in_bytes", 9 * MIB)
    split.write("sys/fs/cgroup/mem ory/job/memory.limit_in_bytes", 5 * MIB)
    split.write("sys/fs/cgroup/mem ory/job/memory.usage_in_bytes", 4 * MIB)
    split.write("sys/fs/cgroup/mem ory/job/memory.stat", f"inactive_file 7\ntotal_inactive_file {2 * MIB}")
    assert allotment.granted_cores(split.root) == 1.5
    assert allotment.whole_cores(split.root) == 1
    assert allotment.memory_bytes(split.root) == 5 * MIB
    assert allotment.available_memory_bytes(split.root) == 3 * MIB


def test_no_quota_in_version_1_is_minus_one(split) -> None:
    split.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", -1)
    split.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", 100_000)
    split.write("sys/fs/cgroup/mem ory/memory.limit_in_bytes", 9223372036854771712)
    assert allotment.usable_cores(split.root) == OWN
    assert allotment.memory_bytes(split.root) == 16_384_000 * 1024


@pytest.mark.parametrize("path", ["/outside/of/the/container", "/../neighbour", "/"])
def test_a_group_that_is_not_seen_is_the_one_that_is(tmp_path, path) -> None:
    machine = Machine(tmp_path, f"0::{path}", "35 24 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
    machine.write("sys/fs/cgroup/memory.max", 3 * MIB)
    machine.write("sys/fs/neighbour/memory.max", MIB)
    assert allotment.memory_bytes(machine.root) == 3 * MIB


def test_a_hierarchy_that_is_mounted_outside_the_namespace_is_searched(tmp_path) -> None:
    machine = Machine(tmp_path, "0::/", "35 24 0:30 /../.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
    machine.write("sys/fs/cgroup/a/cgroup.procs", "1")
    machine.write("sys/fs/cgroup/a/memory.max", 4 * MIB)
    machine.write("sys/fs/cgroup/a/b/cgroup.procs", os.getpid())
    machine.write("sys/fs/cgroup/a/c/memory.max", MIB)
    assert allotment.memory_bytes(machine.root) == 4 * MIB


@pytest.mark.parametrize("namespace", [[], ["unshare", "-C"]], ids=["", "in a namespace"])
def test_a_process_in_a_nested_group_sees_the_limits_above_it(namespace) -> None:
    if namespace and (shutil.which("unshare") is None or os.geteuid() != 0):
        pytest.skip("making a namespace needs unshare and its rights")
    with limited(cores=0.5, memory_bytes=256 * MIB) as enter:
        answer = subprocess.run([*enter, *namespace, sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    cores, whole, memory, available = json.loads(answer.stdout)
    assert (cores, whole, memory) == (0.5, 1, 256 * MIB)
    assert 128 * MIB < available < 256 * MIB
