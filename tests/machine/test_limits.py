"""What cannot fit or end is refused with its number."""

import pytest

from posenc.machine.hardware import check_memory_or_disk, check_time, memory_bytes, readable_size


def test_memory_is_refused_from_the_first_byte_too_many():
    check_memory_or_disk("Two models", 100, 100, "")
    check_memory_or_disk("Two models", 10**30, None, "")  # a system that does not say
    with pytest.raises(ValueError, match=r"Two models need at least 101 bytes .* are 100 bytes"):
        check_memory_or_disk("Two models", 101, 100, "Take one.")


def test_disk_is_refused_from_the_first_byte_too_many():
    check_memory_or_disk("The copies", 100, 100, "", "disk")
    with pytest.raises(ValueError, match="The copies need at least 101 bytes of disk"):
        check_memory_or_disk("The copies", 101, 100, "", "disk")


def test_a_week_is_let_pass_and_more_only_where_it_is_meant():
    check_time("It", 7 * 86400, False, "")
    check_time("It", 10**40, True, "")
    with pytest.raises(ValueError, match=r"would take about 31 days\. Take less"):
        check_time("It", 31 * 86400, False, "Take less.")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (2**20, "1.0 MiB"), (3 * 2**29, "1.5 GiB"), (10**400, None)],
)
def test_sizes_of_any_size_can_be_read(count, text):
    assert readable_size(count) == text or text is None


def test_memory_of_this_machine_is_known_on_linux():
    found = memory_bytes()
    assert found is None or 2**26 < found < 2**60
