# The log of sampled requests: numbered without a gap, whatever the disk and the process do.

import errno
import json
import os
import re
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError, MeasurementError
from servanda.gateway.proxy.config import LogFiles
from servanda.gateway.proxy.request_log import RequestLog
from servanda.promotion.run.request_log_files import files_of
from servanda.traces.request_log import read_served


def test_half_a_line_of_a_crash_stays_where_it_is(tmp_path):
    file = tmp_path / "served-0004.jsonl"
    whole = {"run": "r", "leg": "l", "index": 6, "served": 70}
    file.write_text(f'{json.dumps(whole)}\n{{"run": "r", "le')

    log = RequestLog(LogFiles(tmp_path))
    log.close()

    assert log.path.name == "served-0005.jsonl"
    assert (log.logged, log.sent) == ({("r", "l"): 7}, {("r", "l"): 70})


class Disk:
    """A file on a disk that takes so many bytes more, and the first of them of a longer write."""

    def __init__(self, log, room):
        self._file, self.room = log._file, room
        log._file = self

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        n = self._file.write(data[: self.room])
        self.room -= n
        return n

    def truncate(self, size):
        return self._file.truncate(size)

    def close(self):
        self._file.close()


def numbered(i, **more):
    return json.dumps({"run": "r", "leg": "l", "index": i, "served": i + 1, **more}).encode()


def put(log, i, **more):
    return log.write(numbered(i, **more), json.loads(numbered(i)))


def indices(folder):
    lines = "".join(file.read_text() for file in files_of([folder])).splitlines()
    return [json.loads(line)["index"] for line in lines]


def test_a_full_disk_is_told_and_the_log_goes_on_when_there_is_room(tmp_path):
    log = RequestLog(LogFiles(tmp_path))
    disk = Disk(log, room=100)
    for i in range(6):
        assert put(log, i)
        log.flush()

    assert log.problem == "No space left on device"
    # whole rows, and no half one
    assert log.path.read_bytes().split(b"\n") == [numbered(0), numbered(1), b""]

    disk.room = 10**9
    put(log, 6)
    log.close()

    assert not log.problem
    assert log.path.read_bytes().split(b"\n") == [*map(numbered, range(7)), b""]
    again = RequestLog(LogFiles(tmp_path))
    again.close()
    assert again.logged == {("r", "l"): 7}


def test_what_waits_for_a_disk_too_long_is_given_up_row_by_row_and_leaves_no_gap(tmp_path):
    log = RequestLog(LogFiles(tmp_path), waiting=60_000)
    disk = Disk(log, room=0)
    kept = [put(log, i, token_ids=[7] * 400) for i in range(150)]
    disk.room = 10**9
    log.close()

    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(150))
    lost = [row["index"] for row in rows if row.get("lost") == "no room in the log"]
    assert lost == list(range(len(lost))) and 0 < len(lost) < 150  # the oldest
    assert not all(kept) and "token_ids" not in rows[0] and "token_ids" in rows[-1]


def test_a_log_that_had_to_drop_rows_ends_and_says_so(tmp_path):
    log = RequestLog(LogFiles(tmp_path), waiting=2_000)
    disk = Disk(log, room=0)
    while put(log, 0) or "lost" not in log.problem:
        pass
    log.flush()  # and the disk is still full
    assert log.problem == "rows were lost: start a new log"
    disk.room = 10**9
    assert not put(log, 1)
    log.close()
    assert log.problem == "rows were lost: start a new log"


def test_the_log_is_its_owners_alone(tmp_path):
    """Token ids of prompts and answers are their text, to anyone who has the tokenizer."""
    log = RequestLog(LogFiles(tmp_path))
    put(log, 0)
    log.close()
    for file in (log.path, tmp_path / "counts.json"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_another_file_in_the_folder_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text("{}\n{}\n")

    with pytest.raises(EvidenceError, match=r"x\.jsonl:1 is not a row of a request log"):
        RequestLog(LogFiles(tmp_path))


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl/served"])
def test_a_log_that_cannot_be_kept_is_told_with_the_next_move(tmp_path, name):
    (tmp_path / "x.jsonl").touch()

    with pytest.raises(MeasurementError) as found:
        RequestLog(LogFiles(tmp_path / name))

    assert re.fullmatch(
        rf"no log can be kept in .*{name}: [\w ]+\n"
        "  hint: --log names a folder that can be written",
        str(found.value),
    )


def test_a_file_that_is_full_or_old_is_followed_by_another_one(tmp_path):
    now = 0.0
    log = RequestLog(LogFiles(tmp_path, file_bytes=300, file_s=60.0), clock=lambda: now)
    for i in range(15):
        put(log, i)
        log.flush()
    full = files_of([tmp_path])
    assert len(full) == 3 and all(300 <= file.stat().st_size < 360 for file in full[:-1])

    now = 59.0
    log.flush()
    assert files_of([tmp_path]) == full
    now = 60.0
    log.flush()
    put(log, 15)
    log.close()
    assert len(files_of([tmp_path])) == 4 and indices(tmp_path) == [*range(16)]


def test_a_start_reads_no_more_than_the_newest_file(tmp_path):
    log = RequestLog(LogFiles(tmp_path, file_bytes=1))
    for i in range(4):
        put(log, i)
        log.flush()
    log.close()
    *older, _ = files_of([tmp_path])
    for file in older:
        file.write_text("whatever\n")
    again = RequestLog(LogFiles(tmp_path))
    again.close()
    assert (again.logged, again.sent) == ({("r", "l"): 4}, {("r", "l"): 4})

    (tmp_path / "counts.json").unlink()
    with pytest.raises(EvidenceError, match=r"served-000.\.jsonl:1 is not a row of a request log"):
        RequestLog(LogFiles(tmp_path))


def test_old_files_are_deleted_and_their_numbers_are_not_given_again(tmp_path):
    clock, now = 0.0, 1e9
    files = LogFiles(tmp_path, file_s=10.0, keep_s=100.0)
    log = RequestLog(files, clock=lambda: clock, now=lambda: now)
    (tmp_path / "notes.txt").write_text("not ours")
    put(log, 0)
    log.flush()
    os.utime(log.path, (now, now))
    put(log, 1)
    clock, now = 90.0, now + 90.0
    log.flush()  # ends the first file, begins another one
    assert indices(tmp_path) == [0, 1]
    os.utime(log.path, (now, now))
    clock, now = 180.0, now + 90.0
    log.flush()
    assert indices(tmp_path) == [1]
    clock, now = 270.0, now + 90.0  # nobody asked anything since
    log.flush()
    assert indices(tmp_path) == [] and (tmp_path / "notes.txt").exists()
    log.close()

    again = RequestLog(files)
    again.close()
    assert again.logged == {("r", "l"): 2}


def test_a_folder_is_of_one_gateway_at_a_time(tmp_path):
    log = RequestLog(LogFiles(tmp_path))
    with pytest.raises(MeasurementError) as found:
        RequestLog(LogFiles(tmp_path))
    assert str(found.value) == (
        f"another gateway writes its log to {tmp_path}\n"
        "  hint: give each gateway a folder of its own, or wait until that one has ended"
    )
    log.close()
    RequestLog(LogFiles(tmp_path)).close()


def test_a_log_without_tokens_says_that_requests_were_sent_and_nothing_of_them(tmp_path):
    log = RequestLog(LogFiles(tmp_path, tokens=False))
    more = {"at": 5.0, "labels": {"who": "Ada"}, "sampling": {"max_new_tokens": 9}}
    more |= {"prompt_token_ids": [11, 12], "token_ids": [13], "logprobs": [-1.5], "finish": "stop"}
    put(log, 0, **more)
    log.close()

    text = log.path.read_text()
    assert not re.search(r"\b1[123]\b|Ada|-1\.5", text)
    (request,) = read_served(text, "x")
    assert (request.index, request.at, request.lost) == (0, 5.0, "not kept")


@given(
    st.lists(
        st.sampled_from(["row", "row", "flush", "later", "full", "room", "crash", "torn", "start"]),
        max_size=60,
    )
)
def test_rows_are_numbered_without_a_gap_whatever_happens(tmp_path_factory, acts):
    """A crash may lose rows that were not written yet; a start goes on from the others."""
    folder, clock = tmp_path_factory.mktemp("log"), [0.0]
    log, disk = begun(folder, clock)
    for act in acts:
        if act == "row":
            put(log, log.logged.get(("r", "l"), 0), token_ids=[7] * 40)
        elif act == "later":
            clock[0] += 30.0
        elif act == "flush":
            log.flush()
        elif act in ("full", "room"):
            disk.room = 100 if act == "full" else 10**9
        elif act == "start":
            log.close()
            log, disk = begun(folder, clock)
        else:
            with log.path.open("ab") as file:
                file.write(b'{"run": "r", "l' if act == "torn" else b"")
            killed(log)
            log, disk = begun(folder, clock)
    disk.room = 10**9
    log.close()
    rows = [r for f in files_of([folder]) for r in whole(f)]
    assert [r["index"] for r in rows] == list(range(len(rows)))


def begun(folder, clock):
    files = LogFiles(folder, file_bytes=800, file_s=60.0)
    log = RequestLog(files, 5_000, clock=lambda: clock[0])
    return log, Disk(log, room=10**9)


def killed(log):
    """As by kill -9: nothing more is written, and the system lets the folder go."""
    log._file.close()
    os.close(log._lock)


def whole(file):
    *rows, _ = file.read_bytes().split(b"\n")
    return map(json.loads, rows)
