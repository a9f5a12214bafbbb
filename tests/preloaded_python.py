"""A Python that has already imported PyTorch and Transformers, for tests that run many scripts with them.

`Server(folder)` starts a process that imports them once and then waits. `Server.python` is a program that takes the
place of the interpreter: it hands its arguments, folder, environment and streams to the server, which forks a process
for them, and ends as that one ends. Killing the program kills the process. Only `PROGRAM [-u] SCRIPT ARGUMENT...` and
`-m MODULE` are understood. Linux only.
"""

import array
import contextlib
import gc
import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import traceback
import weakref
from pathlib import Path

IMPORTS = """\
import torch, transformers
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM
from transformers import GPTBigCodeForCausalLM, Starcoder2ForCausalLM, default_data_collator, get_scheduler
"""
STREAMS = 3


class Server:
    def __init__(self, folder: Path):
        self.python = folder / "python"
        address = str(folder / "socket")
        words = shlex.join([sys.executable, "-I", "-S", __file__, "client", address])
        self.python.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        self.python.chmod(0o755)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(address)
        listening.listen(64)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen([sys.executable, __file__, "serve", str(listening.fileno())], env=environment,
                                        pass_fds=[listening.fileno()], stdin=subprocess.DEVNULL)
        listening.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def receive(connection: socket.socket) -> tuple:
    """A request, which is one line of JSON, and the streams that came with its first byte."""
    streams = array.array("i")
    text, ancillary, _, _ = connection.recvmsg(1 << 16, socket.CMSG_LEN(STREAMS * streams.itemsize))
    for _, _, data in ancillary:
        streams.frombytes(data)
    while not text.endswith(b"\n"):
        more = connection.recv(1 << 16)
        if not more:
            raise EOFError
        text += more
    return json.loads(text), list(streams)


def run_script(request: dict, streams: list) -> int:
    """In the forked process: the script as `python SCRIPT ARGUMENT...` runs it. Returns the exit code."""
    import runpy

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    arguments = [word for word in request["arguments"] if word != "-u"]
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
    sys.stdout.reconfigure(line_buffering=True)
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path[:1] = ["", *path]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[:1] = [str(Path(arguments[0]).resolve().parent), *path]
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code == 1 and isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        error = sys.exc_info()[1]
        # The frames of this file and of runpy are not the script's.
        ours = error.__traceback__
        while ours is not None and ours.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            ours = ours.tb_next
        sys.excepthook(type(error), error, ours)
        code = 1
    return code


def serve(listening: socket.socket) -> None:
    # What was imported is no garbage, which to find out took a quarter of the scripts' time, and nobody's to clear up at exit.
    gc.disable()
    exec(IMPORTS, {})
    for imported in gc.get_objects():
        if isinstance(imported, weakref.finalize):
            imported.atexit = False
    gc.freeze()
    gc.enable()
    watch = selectors.DefaultSelector()
    watch.register(listening, selectors.EVENT_READ)
    running = {}  # pid: its pidfd and the client's connection

    def start(connection: socket.socket) -> None:
        try:
            request, streams = receive(connection)
        except (EOFError, OSError):
            connection.close()
            return
        pid = os.fork()
        if pid == 0:
            watch.close()
            listening.close()
            connection.close()
            code = 1
            try:
                code = run_script(request, streams)
                import threading

                threading._shutdown()
                import atexit

                atexit._run_exitfuncs()
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code & 255)
        for stream in streams:
            os.close(stream)
        connection.sendall(f"{pid}\n".encode())
        ended = os.pidfd_open(pid)
        running[pid] = ended, connection
        watch.register(ended, selectors.EVENT_READ, pid)
        watch.register(connection, selectors.EVENT_READ, pid)

    def finish(pid: int) -> None:
        ended, connection = running.pop(pid)
        _, status = os.waitpid(pid, 0)
        watch.unregister(ended)
        watch.unregister(connection)
        os.close(ended)
        with contextlib.suppress(OSError):
            connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        connection.close()

    while True:
        for key, _ in watch.select():
            if key.fileobj is listening:
                start(listening.accept()[0])
            elif key.data in running:
                if key.fileobj is running[key.data][1]:  # the client is gone
                    os.kill(key.data, signal.SIGKILL)
                finish(key.data)


def client(address: str, arguments: list) -> int:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    text = json.dumps(request).encode() + b"\n"
    sent = connection.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", range(STREAMS)))])
    connection.sendall(text[sent:])
    answers = connection.makefile()
    pid = int(answers.readline())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = int(answers.readline())
    if code < 0:  # as the process ended, so does this one
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    sys.exit(client(sys.argv[2], sys.argv[3:]))
