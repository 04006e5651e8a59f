"""Following a policy file, and what a change is called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from picker.policy import Policy, PolicyError
from picker.policy.reload import PolicyFile, diff_policies
from tests.policy.policies import load, profile, sample, with_class

GOOD = sample("premium.yaml")
BAD = GOOD.replace("quantum: 128", "qantum: 128")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(GOOD)
    return path


def test_a_version_is_given_once(path: Path) -> None:
    file = PolicyFile(path)
    first = file.load_if_changed()
    assert first is not None
    assert first.source == str(path)
    assert file.load_if_changed() is None
    path.write_text(GOOD.replace("quantum: 128", "quantum: 256"))
    second = file.load_if_changed()
    assert second is not None
    assert second.root.classes[1].quantum == 256
    assert (file.stats.loaded, file.stats.refused) == (2, 0)


def test_a_touched_file_has_not_changed_and_an_old_one_may_have(path: Path) -> None:
    file = PolicyFile(path)
    file.load_if_changed()
    os.utime(path, (1, 1))
    assert file.load_if_changed() is None
    path.write_text(GOOD.replace("quantum: 128", "quantum: 999"))
    os.utime(path, (1, 1))
    assert file.load_if_changed() is not None


def test_a_bad_version_is_reported_once_and_shown_until_it_is_gone(path: Path) -> None:
    file = PolicyFile(path)
    file.load_if_changed()
    path.write_text(BAD)
    with pytest.raises(PolicyError, match="qantum") as caught:
        file.load_if_changed()
    assert file.load_if_changed() is None
    assert file.error is caught.value
    path.write_text(GOOD)
    assert file.load_if_changed() is not None
    assert file.error is None
    assert (file.stats.loaded, file.stats.refused) == (2, 1)


def test_another_bad_version_is_reported_again(path: Path) -> None:
    file = PolicyFile(path)
    for text in (BAD, BAD + "# still\n", BAD):
        path.write_text(text)
        with pytest.raises(PolicyError):
            file.load_if_changed()
    assert file.stats.refused == 3


def test_a_missing_file_is_reported_once_and_found_when_it_comes(path: Path) -> None:
    path.unlink()
    file = PolicyFile(path)
    with pytest.raises(PolicyError, match="cannot be read: No such file"):
        file.load_if_changed()
    assert file.load_if_changed() is None
    path.write_text(GOOD)
    assert file.load_if_changed() is not None


@pytest.mark.parametrize(
    ("content", "problem"), [(b"a: \xff\xfe", "not UTF-8"), (b"#" * 2000, "at most 1,500 are allowed")]
)
def test_content_that_is_no_policy_text_is_refused(path: Path, content: bytes, problem: str) -> None:
    path.write_bytes(content)
    with pytest.raises(PolicyError, match=problem):
        PolicyFile(path, max_bytes=1500).load_if_changed()


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="cannot be read"):
        PolicyFile(tmp_path).load_if_changed()


def test_the_swap_of_a_mounted_config_map_is_seen(tmp_path: Path) -> None:
    """A kubelet writes a new directory and renames the `..data` symlink; the file's own link never changes."""
    for version, text in (("one", GOOD), ("two", GOOD.replace("quantum: 128", "quantum: 64"))):
        (tmp_path / version).mkdir()
        (tmp_path / version / "policy.yaml").write_text(text)
        os.utime(tmp_path / version / "policy.yaml", (1, 1))
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "policy.yaml").symlink_to("..data/policy.yaml")
    file = PolicyFile(tmp_path / "policy.yaml")
    assert file.load_if_changed() is not None
    (tmp_path / "..next").symlink_to("two")
    (tmp_path / "..next").rename(tmp_path / "..data")
    policy = file.load_if_changed()
    assert policy is not None
    assert policy.root.classes[1].quantum == 64


def test_the_same_policy_has_no_difference() -> None:
    diff = diff_policies(load(profile()), load(profile()))
    assert not diff
    assert str(diff) == "no change"


def test_classes_come_go_and_change() -> None:
    new = with_class(
        quantum=1024,
        max_queue_wait=30,
        queue_policy="wspt",
        fair_tenants=True,
        tolerations=["spot", "gpu=a:NoSchedule"],
        allowed_endpoints={"zone": "a"},
        selection={"temperature": 0.5},
        affinity={"edges": [2, 4]},
    )
    new["policy_classes"][2] = {"name": "nightly", "quantum": 64}
    diff = diff_policies(load(profile()), load(new))
    assert diff
    assert diff.added == ("nightly",)
    assert diff.removed == ("direct",)
    assert diff.changed == (
        "std-small: queue_policy fcfs -> wspt",
        "std-small: quantum 512 -> 1024",
        "std-small: max_queue_wait none -> 30",
        "std-small: affinity.edges 4, 16, 64, 256 -> 2, 4",
        "std-small: fair_tenants false -> true",
        "std-small: tolerations none -> spot, gpu=a:NoSchedule",
        "std-small: allowed_endpoints none -> zone=a",
        "std-small: selection.temperature 0 -> 0.5",
    )
    assert str(diff).splitlines()[:3] == ["+ nightly", "- direct", "~ std-small: queue_policy fcfs -> wspt"]


def test_a_class_of_the_same_name_in_another_profile_is_another_class() -> None:
    diff = diff_policies(load(profile()), load({"models": {"m": profile()}}))
    assert diff.removed == ("std-small", "std-large", "direct")
    assert diff.added == ("default", "m/std-small", "m/std-large", "m/direct")


def test_moved_buckets_and_default_families_are_changes_of_the_profile() -> None:
    new = profile(default_policy_family="other")
    new["uncached_isl_buckets"][1]["min_tokens"] = 2000
    new["policy_classes"][2:] = [
        {"name": "o-small", "policy_family": "other", "cache_bucket": "small", "quantum": 1},
        {"name": "o-large", "policy_family": "other", "cache_bucket": "large", "quantum": 1},
    ]
    diff = diff_policies(load(profile()), load(new))
    assert diff.changed == (
        "root profile: default_policy_family standard -> other",
        "root profile: uncached_isl_buckets small from 0, large from 1000 -> small from 0, large from 2000",
    )


def test_from_the_built_in_policy_to_a_file() -> None:
    diff = diff_policies(Policy.default(), load(profile()))
    assert "- default" in str(diff).splitlines()
    assert "root profile: default_policy_family none -> standard" in diff.changed
