"""tessera launch: how jobs end: failures, signals, restarts, several machines. The workers are small scripts."""

import json
import os
import re
import signal
import socket
import time

import pytest
from launch_support import (LOST, SECRET, TELL_PLACE, Job, alive, children, free_port, launch,
                            lines_of, numbers_in, python, shell, wait_for, wait_until_gone)


# Ends


@pytest.mark.parametrize("how,code,text", [("exit 7", 7, "exited with code 7"), ("kill -9 $$", 137, "killed by signal 9 (Killed)"),
                                           ("kill -SEGV $$", 139, "killed by signal 11 (Segmentation fault)"),
                                           ("kill -TERM $$", 143, "killed by signal 15 (Terminated)")])
def test_the_first_failure_is_named(tessera_program, how, code, text):
    started = time.monotonic()
    job = launch(tessera_program, "--num_processes", 3,
                 *shell(f"[ $RANK = 1 ] || sleep 100; echo last words >&2; ulimit -c 0; {how}"), code=code)
    assert time.monotonic() - started < 10
    report = job.err[job.err.index("error: "):]
    assert re.match(rf"error: rank 1 \(host \S+, pid \d+\) .*{re.escape(text)}", report), report
    assert "[rank 1] last words" in report and "ranks 0, 2 were ended by the launcher" in report


def test_only_the_last_lines_are_repeated(tessera_program):
    job = launch(tessera_program, *shell("seq 1000 >&2; exit 1"), code=1)
    report = job.err[job.err.index("error: "):].splitlines()
    assert report[1:] == [f"[rank 0] {i}" for i in range(981, 1001)]


@pytest.mark.parametrize("cause,code,text", [("kill -9 $$", 137, "killed by signal 9"), ("echo my own error >&2; exit 3", 3, "code 3")])
def test_who_only_lost_others_is_not_blamed(tessera_program, cause, code, text):
    """Rank 0 notices first, the reason comes a little later."""
    job = launch(tessera_program, "--num_processes", 3, *shell(
        f"case $RANK in 0) echo 'CommunicationError: all_reduce of dp waited for rank 1' >&2; exit 1;; "
        f"1) sleep 0.4; {cause};; 2) sleep 100;; esac"), code=code)
    report = job.err[job.err.index("error: "):]
    assert report.startswith("error: rank 1 ") and text in report.splitlines()[0]
    assert "rank 0, which waited for others, said:\n[rank 0] CommunicationError: all_reduce" in report
    assert "rank 2 was ended by the launcher" in report


def test_a_stopped_worker_gave_no_answer(tessera_program, tmp_path):
    job = launch(tessera_program, "--num_processes", 3, *shell(
        f"echo $$ > '{tmp_path}'/pid-$RANK; [ $RANK != 1 ] || kill -STOP $$; sleep 0.5; "
        "echo 'error: all_reduce of dp did not finish within 0.5 s: rank 1 does not answer' >&2; exit 1"), code=7)
    assert re.search(r"error: rank 1 \(host \S+, pid \d+\) gave no answer \(stopped\)", job.err), job.err
    assert "rank 1 does not answer" in job.err[job.err.index("error: rank"):]
    wait_until_gone(*numbers_in(tmp_path, 3), timeout=1)


def test_a_worker_that_will_not_end_is_killed(tessera_program, tmp_path):
    started = time.monotonic()
    job = launch(tessera_program, "--num_processes", 2, *shell(
        f"echo $$ > '{tmp_path}'/pid-$RANK; [ $RANK = 1 ] && exit 5; trap '' TERM; while true; do sleep 1; done"), code=5)
    assert 3 < time.monotonic() - started < 10
    assert "rank 0 was killed by the launcher" in job.err
    wait_until_gone(*numbers_in(tmp_path, 2), timeout=1)


def test_what_workers_leave_behind_is_ended(tessera_program, tmp_path):
    launch(tessera_program, "--num_processes", 2, *shell(f"sleep 1000 & echo $! > '{tmp_path}'/pid-$RANK"))
    wait_until_gone(*numbers_in(tmp_path, 2), timeout=1)


def test_nobody_outlives_a_killed_launcher(tessera_program, tmp_path):
    text = f"sleep 1000 & echo $! > '{tmp_path}'/pid-a$RANK; echo $$ > '{tmp_path}'/pid-b$RANK; echo $TESSERA_STORE; sleep 1000"
    with Job(tessera_program, "--num_processes", 3, *shell(text)) as job:
        workers = numbers_in(tmp_path, 6)
        port = int(job.process.stdout.readline().rpartition(b":")[2])
        everyone = workers + children(job.process.pid)
        job.process.kill()
        job.process.wait()
        wait_until_gone(*everyone)
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))


def test_nobody_outlives_a_launcher_whose_guard_was_killed(tessera_program, tmp_path):
    with Job(tessera_program, "--num_processes", 2, *shell(f"echo $$ > '{tmp_path}'/pid-$RANK; exec sleep 1000")) as job:
        workers = numbers_in(tmp_path, 2)
        for guard in set(children(job.process.pid)) - set(workers):
            os.kill(guard, signal.SIGKILL)
        time.sleep(0.1)
        assert all(map(alive, workers))
        job.process.kill()
        wait_until_gone(*workers)


# Signals


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(tessera_program, tmp_path, sent):
    worker = python(f"import os, signal, sys, time\nrank = os.environ['RANK']\n"
                    f"def end(number, _):\n print('got', number, flush=True); time.sleep(0.3); sys.exit(128 + number)\n"
                    f"signal.signal({sent.value}, end)\nopen('{tmp_path}/pid-' + rank, 'w').write('%d\\n' % os.getpid())\ntime.sleep(100)")
    with Job(tessera_program, "--num_processes", 2, "--max_restarts", 3, *worker) as job:
        workers = numbers_in(tmp_path, 2)
        job.process.send_signal(sent)
        job.finish(128 + sent)
    assert [lines_of(job.out, rank) for rank in range(2)] == [[f"got {sent.value}"]] * 2
    assert f"ended by signal {sent.value}" in job.err
    wait_until_gone(*workers, timeout=1)


def test_a_job_that_ends_well_after_a_signal_ended_well(tessera_program, tmp_path):
    worker = shell(f"trap 'exit 0' INT; echo $$ > '{tmp_path}'/pid-$RANK; while true; do sleep 0.05; done")
    with Job(tessera_program, "--num_processes", 2, *worker) as job:
        numbers_in(tmp_path, 2)
        job.process.send_signal(signal.SIGINT)
        job.finish(0)


def test_the_second_signal_kills(tessera_program, tmp_path):
    worker = shell(f"trap '' INT; echo $$ > '{tmp_path}'/pid-$RANK; while true; do sleep 1; done")
    with Job(tessera_program, "--num_processes", 2, *worker) as job:
        workers = numbers_in(tmp_path, 2)
        job.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert job.process.poll() is None and all(map(alive, workers))
        started = time.monotonic()
        job.process.send_signal(signal.SIGINT)
        job.finish(130)
        assert time.monotonic() - started < 3
    wait_until_gone(*workers, timeout=1)


def test_the_grace_after_a_signal_ends(tessera_program, tmp_path):
    worker = shell(f"trap '' TERM; echo $$ > '{tmp_path}'/pid-$RANK; while true; do sleep 1; done")
    with Job(tessera_program, "--num_processes", 2, "--grace_s", 0.5, *worker) as job:
        numbers_in(tmp_path, 2)
        started = time.monotonic()
        job.process.terminate()
        job.finish(143)
        assert 0.4 < time.monotonic() - started < 5


def test_user_signals_are_passed_on_and_end_nothing(tessera_program, tmp_path):
    worker = shell(f"trap 'echo one' USR1; trap 'echo two; exit 0' USR2; echo $$ > '{tmp_path}'/pid-$RANK; while true; do sleep 0.05; done")
    with Job(tessera_program, "--num_processes", 2, *worker) as job:
        numbers_in(tmp_path, 2)
        for sent in (signal.SIGUSR1, signal.SIGUSR2):
            job.process.send_signal(sent)
            time.sleep(0.5)
        job.finish(0)
    assert [lines_of(job.out, rank) for rank in range(2)] == [["one", "two"]] * 2


def test_ignored_signals_stay_ignored(tessera_program, tmp_path):
    worker = shell(f"echo $$ > '{tmp_path}'/pid-$RANK; sleep 0.7")
    with Job(tessera_program, *worker, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as job:
        numbers_in(tmp_path, 1)
        job.process.send_signal(signal.SIGHUP)
        job.finish(0)


# Restarts


def test_restarts(tessera_program, tmp_path):
    worker = shell("echo attempt $TESSERA_RESTART; sleep 0.1; [ $RANK != 1 ] || [ $TESSERA_RESTART = 2 ] || exit 9; "
                   "[ $TESSERA_RESTART = 2 ] || sleep 100")
    arguments = ["--num_processes", 2, "--log_dir", tmp_path, "--restart_delay_s", 0.1]
    job = launch(tessera_program, *arguments, "--max_restarts", 2, *worker)
    assert lines_of(job.out, 0) == lines_of(job.out, 1) == ["attempt 0", "attempt 1", "attempt 2"]
    assert job.err.count("exited with code 9") == 2 and "restart 2 of 2" in job.err and "error:" not in job.err
    assert re.findall(r"--- attempt (\d)", (tmp_path / "rank-0.log").read_text()) == ["0", "1", "2"]
    job = launch(tessera_program, *arguments, "--max_restarts", 1, *worker, code=9)
    assert lines_of(job.out, 0) == ["attempt 0", "attempt 1"]
    assert "(all 1 restart used up)" in job.err


# Several machines


def machine(program, rank, port, *args, secret=SECRET, machines=2, **options):
    return Job(program, "--num_machines", machines, "--num_processes", 2 * machines, "--machine_rank", rank, "--main_process_ip",
               "127.0.0.1", "--main_process_port", port, *args, env={"TESSERA_JOB_SECRET": secret} if secret else {}, **options)


def test_two_machines(tessera_program, tmp_path):
    port = free_port()
    secret_file = tmp_path / "secret"
    secret_file.write_text(SECRET + "\n")
    secret_file.chmod(0o644)  # as Kubernetes mounts one
    with machine(tessera_program, 0, port, "--secret_file", secret_file, *shell("true"), secret=None) as refused:
        assert f"can be read by others (mode 644): chmod 600 {secret_file}" in refused.finish(2).err
    taken = ["--secret_file", secret_file, "--allow_secret_mode"]
    with machine(tessera_program, 1, port, *python(TELL_PLACE)) as second:
        time.sleep(0.3)
        with machine(tessera_program, 0, port, *taken, *python(TELL_PLACE), secret=None) as first:
            outs = [first.finish().out, second.finish().out]
    for rank in range(4):
        place = json.loads(lines_of(outs[rank // 2], rank)[0])
        assert (place["RANK"], place["LOCAL_RANK"], place["WORLD_SIZE"], place["LOCAL_WORLD_SIZE"]) == (str(rank), str(rank % 2), "4", "2")
        assert place["TESSERA_STORE"] == f"127.0.0.1:{port}" and place["TESSERA_JOB_SECRET"] == SECRET


@pytest.mark.parametrize("failing", [0, 3])
def test_a_failure_on_one_machine_ends_and_restarts_all(tessera_program, failing):
    port = free_port()
    worker = shell(f"echo attempt $TESSERA_RESTART; sleep 0.2; [ $RANK != {failing} ] || {{ echo reason >&2; exit 6; }}; sleep 100")
    with machine(tessera_program, 0, port, "--max_restarts", 1, *worker) as first:
        with machine(tessera_program, 1, port, "--max_restarts", 1, *worker) as second:
            for job in (first, second):
                job.finish(6)
                assert re.search(rf"error: rank {failing} \(host .* exited with code 6", job.err), job.err
                assert "[rank %d] reason" % failing in job.err[job.err.index("error: "):]
                assert job.out.count("attempt 1") == 2


def test_machines_that_do_not_come(tessera_program):
    port = free_port()
    with machine(tessera_program, 1, port, "--join_timeout_s", 1, *shell("true")) as late:
        assert f"no launcher of machine 0 at 127.0.0.1:{port}" in late.finish(LOST).err
    with machine(tessera_program, 0, port, "--join_timeout_s", 1, *shell("echo started"), machines=3) as alone:
        assert "machine_rank 1, 2" in alone.finish(LOST).err and alone.out == ""
    with machine(tessera_program, 0, port, *shell("echo started")) as waiting:
        time.sleep(0.5)
        waiting.process.send_signal(signal.SIGINT)
        assert waiting.finish(130, timeout=5).out == ""


def test_another_secret_is_refused(tessera_program):
    port = free_port()
    with machine(tessera_program, 0, port, "--join_timeout_s", 10, *shell("sleep 1; echo done")) as first:
        with machine(tessera_program, 1, port, *shell("true"), secret="f" * 32) as wrong:
            assert "secret" in wrong.finish(LOST, timeout=10).err
        # It did no harm: the right one is still let in.
        with machine(tessera_program, 1, port, *shell("echo done")) as right:
            assert right.finish().out.count("done") == first.finish().out.count("done") == 2


def test_without_a_secret_machines_find_each_other_and_say_so_once(tessera_program):
    """The two commands as a guide prints them."""
    port = free_port()
    with machine(tessera_program, 0, port, "--multi_gpu", *python(TELL_PLACE), secret=None) as first:
        with machine(tessera_program, 1, port, "--multi_gpu", *python(TELL_PLACE), secret=None) as second:
            jobs = [first.finish(), second.finish()]
    for job in jobs:
        assert job.err.count("without a secret") == 1, job.err
        for part in (f"meet at 127.0.0.1:{port}", "open to whoever reaches that port", "--secret_file", "TESSERA_REQUIRE_SECRET=1"):
            assert part in job.err, job.err
    places = [json.loads(lines_of(jobs[rank // 2].out, rank)[0]) for rank in range(4)]
    assert [place["RANK"] for place in places] == ["0", "1", "2", "3"]
    assert len({place["TESSERA_JOB_SECRET"] for place in places}) == 1


@pytest.mark.parametrize("first_has, second_has", [(SECRET, None), (None, SECRET)])
def test_a_secret_on_one_machine_only_is_refused_on_both(tessera_program, first_has, second_has):
    port = free_port()
    with machine(tessera_program, 0, port, *shell("echo started"), secret=first_has) as first:
        with machine(tessera_program, 1, port, *shell("echo started"), secret=second_has) as second:
            jobs = [first.finish(LOST), second.finish(LOST)]
    for job in jobs:
        assert job.out == "" and "give every machine the same --secret_file" in job.err, job.err
    assert ("a machine without a secret came" if first_has else "has a secret, and machine 0 has none") in jobs[0].err
    assert ("has no secret, and machine 0 has one" if first_has else "has a secret, and machine 0 has none") in jobs[1].err


def test_what_is_no_machine_hinders_nobody(tessera_program):
    port = free_port()
    with machine(tessera_program, 0, port, *shell("echo done"), secret=None) as first:
        wait_for(lambda: knocked(port), "the store")
        with machine(tessera_program, 1, port, *shell("echo done"), secret=None) as second:
            assert second.finish().out.count("done") == first.finish().out.count("done") == 2


def knocked(port: int) -> bool:
    """Somebody who looks what listens there: as much as a proof has, and none."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as probe:
            probe.sendall(b"GET / HTTP/1.1\r\n" * 10)
            while probe.recv(1024):
                pass
    except ConnectionResetError:
        pass
    except OSError:
        return False
    return True


def test_a_secret_can_be_required(tessera_program):
    job = Job(tessera_program, "--num_machines", 2, "--num_processes", 4, "--machine_rank", 0, "--main_process_ip", "127.0.0.1",
              *shell("echo started"), env={"TESSERA_REQUIRE_SECRET": "1"})
    with job:
        assert "TESSERA_REQUIRE_SECRET is set" in job.finish(2).err and job.out == ""


def test_machines_must_be_told_the_same(tessera_program):
    port = free_port()
    with machine(tessera_program, 0, port, "--max_restarts", 1, *shell("true")) as first:
        with machine(tessera_program, 1, port, *shell("true")) as second:
            assert "told different things" in second.finish(LOST).err
            assert "told different things" in first.finish(LOST).err


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_launcher_ends_the_job(tessera_program, tmp_path, victim):
    """Its workers die with it; those of the other machine lose them and fail."""
    port = free_port()
    worker = shell(f"echo $$ > '{tmp_path}'/pid-$RANK; while [ ! -e '{tmp_path}'/lost ]; do sleep 0.05; done; "
                   "echo 'CommunicationError: lost rank' >&2; exit 1")
    with machine(tessera_program, 0, port, *worker) as first, machine(tessera_program, 1, port, *worker) as second:
        workers = numbers_in(tmp_path, 4)
        jobs = [first, second]
        jobs[victim].process.kill()
        (tmp_path / "lost").touch()
        error = jobs[1 - victim].finish(1, timeout=20).err
        assert f"the launcher of machine {victim} " in error[error.index("error: "):], error
        wait_until_gone(*workers, timeout=1)
