"""Where a process stands among others: by flags, or as the launcher says."""

from __future__ import annotations

import pytest

from jaxtrain.cluster.join import ProcessPlace, launcher, place_of, process_count, process_number

SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-4]", "SLURM_NTASKS": "4", "SLURM_PROCID": "2",
}  # fmt: skip
MPI = {
    "OMPI_MCA_orte_hnp_uri": "1;tcp://1.2.3.4:5", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
}  # fmt: skip
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "found", "count"),
    [
        ({}, None, 1),
        (SLURM, "SLURM", 4),
        (SLURM | {"SLURM_NTASKS": "1"}, None, 1),
        ({"SLURM_JOB_ID": "7"}, None, 1),  # an allocation, and no step of it
        (MPI, "Open MPI", 2),
        (MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None, 1),
        (KUBERNETES, None, 1),  # a pod that is no part of a job
        (KUBERNETES | {"JOB_COMPLETION_INDEX": "3"}, "Kubernetes", None),
    ],
)
def test_the_launcher_is_known_by_what_jax_needs_of_it(environ, found, count) -> None:
    assert launcher(environ) == found
    if count is not None:
        assert process_count(None, environ) == count
    else:
        with pytest.raises(ValueError, match=f"{found} does not say how many"):
            process_count(None, environ)
    assert process_count(ProcessPlace("a:1", 3, 2), environ) == 3, "flags come first"
    assert process_number(ProcessPlace("a:1", 3, 2), environ) == 2
    numbers = {"SLURM": 2, "Open MPI": 1, "Kubernetes": 3}
    assert process_number(None, environ) == numbers.get(found, 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("a:1", 2, None), "add --process,"),
        ((None, 2, 0), "add --coordinator,"),
        ((None, None, 1), "add --coordinator and --processes,"),
        (("a", 2, 0), "coordinator='a'; use HOST:PORT"),
        (("a:99999", 2, 0), "coordinator='a:99999'"),
        (("a:1", 0, 0), "processes=0; use 1 or more"),
        (("a:1", 2, 2), "process=2 of processes=2; use 0 to 1"),
        (("a:1", 2, -1), "process=-1 of processes=2"),
    ],
)
def test_half_a_place_is_refused(given, said) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        place_of(*given)


def test_flags_give_a_place_or_none() -> None:
    assert place_of(None, None, None) is None
    assert place_of("[::1]:8476", 4, 3) == ProcessPlace("[::1]:8476", 4, 3)
