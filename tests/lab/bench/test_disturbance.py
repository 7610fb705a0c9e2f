"""What a benchmark says of its machine, beside real processes."""

import subprocess
import sys
import time

import psutil
import pytest

from ryzanstein.lab.bench import disturbance
from ryzanstein.lab.bench.disturbance import Disturbance, Watch

BUSY = "import time\nend = time.monotonic() + {}\nwhile time.monotonic() < end: pass"


def test_work_of_descendants_is_our_own() -> None:
    """While they run, and after they have been waited for."""
    before_s = disturbance._own_s()
    with subprocess.Popen([sys.executable, "-P", "-c", BUSY.format(1.0)]) as child:
        time.sleep(0.5)
        used_s = sum(psutil.Process(child.pid).cpu_times()[:2])
        running_s = disturbance._own_s() - before_s
    assert 0 < used_s <= running_s <= disturbance._own_s() - before_s


def test_a_process_of_others_is_one() -> None:
    """A process that left its parent: it is nobody's descendant, as that of another user is."""
    watch = Watch()
    command = [sys.executable, "-P", "-c", BUSY.format(1.5)]
    leave = f"import subprocess; subprocess.Popen({command!r}, start_new_session=True)"
    subprocess.run([sys.executable, "-P", "-c", leave], check=True)
    time.sleep(1.5)
    seen = watch.stop()
    assert seen.foreign_cores > 0.1, "on a busy machine it gets less than a core, and others the rest"
    assert not seen.is_quiet
    assert "DISTURBED" in str(seen)


@pytest.mark.parametrize(
    ("seen", "quiet"),
    [(Disturbance(2, 0.0, 0.0), True), (Disturbance(2, 0.2, 0.0), False), (Disturbance(2, 0.0, 0.2), False)],
)
def test_both_kinds_count(seen: Disturbance, quiet: bool) -> None:
    assert (seen.is_quiet, seen.document()["quiet"]) == (quiet, quiet)
