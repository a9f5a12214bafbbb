"""`tessera serve`: texts of many clients at once are those of `tessera generate`, on every layout; what clients do wrong is told
them, and nobody else feels it."""

import concurrent.futures
import gzip
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import environment, run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
NEW = 12
KEY = "a-key-of-some-length"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("served") / "tiny"
    transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=24, n_head=4, vocab_size=257, n_positions=64,
                                                         initializer_range=0.3)).save_pretrained(folder)
    return folder


class Server:
    """A running `tessera serve`."""

    def __init__(self, program, model, *arguments, launch=(), tokenizer="bytes", **options):
        words = [program, *launch, *([program] if launch else []), "serve", model, "--tokenizer", tokenizer, "--port", "0",
                 "--threads", "1", *arguments]
        self.process = subprocess.Popen(list(map(str, words)), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment(
            OMP_NUM_THREADS="1", TESSERA_PYTHON=sys.executable, PYTHONPATH=str(ROOT / "python")), **options)
        self.said = ""
        while not (found := re.search(r"http://\S+:(\d+)", self.said)):
            line = self.process.stderr.readline()
            assert line, self.said
            self.said += line
        self.port = int(found[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def connect(self, timeout=300):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(self, body=None, path="/v1/completions", method="POST", connection=None, code=200, headers={}):
        """The answer's object."""
        own = connection or self.connect()
        data = body if isinstance(body, (bytes, str, type(None))) else json.dumps(body)
        own.request(method, path, data, {"Content-Type": "application/json", **headers})
        answer = own.getresponse()
        text = answer.read()
        if connection is None:
            own.close()
        assert answer.status == code, (answer.status, text)
        return json.loads(text)

    def stop(self, by=signal.SIGTERM, code=0, within=30):
        self.process.send_signal(by)
        begin = time.monotonic()
        said = self.process.communicate(timeout=within)[1]
        assert self.process.returncode == code, self.said + said
        return time.monotonic() - begin


def prompts(count):
    return [f"prompt {i * 7919 % 1000} " + "xyz"[i % 3] * (i % 11) for i in range(count)]


@pytest.fixture(scope="module")
def expected(tessera_program, model, tmp_path_factory, long_run):
    """{prompt: greedy text}, by `tessera generate`."""
    folder = tmp_path_factory.mktemp("expected")
    (folder / "in.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts(1000 if long_run else 200)))
    run(tessera_program, "generate", model, "--tokenizer", "bytes", "--threads", "1", "--temperature", "0", "--max-new-tokens", NEW,
        "--batch-size", 32, "--input", folder / "in.jsonl", "--output", folder / "out.jsonl")
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return {line["prompt"]: line["text"] for line in lines}


@pytest.fixture(scope="module")
def server(tessera_program, model):
    with Server(tessera_program, model) as running:
        yield running


def greedy(prompt, **more):
    return {"prompt": prompt, "max_tokens": NEW, "temperature": 0, **more}


def events(answer):
    """Objects of a stream, which must end as it should."""
    lines = [line for line in answer.read().decode("utf-8", "replace").split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines[:-1]]


def memory_of(process) -> int:
    return int(re.search(r"VmRSS:\s+(\d+)", open(f"/proc/{process.pid}/status").read())[1])


def test_many_connections(server, expected, long_run):
    """None is lost or mixed up, while other clients leave in the middle."""
    texts, threads = list(expected), 32 if long_run else 16

    def talk(number):
        connection, found = server.connect(), {}
        for i, text in enumerate(texts[number::threads]):
            if i % 5 == 4:  # a client that is killed
                leaving = socket.create_connection(("127.0.0.1", server.port))
                body = json.dumps({"prompt": text, "max_tokens": 50, "stream": True}).encode()
                leaving.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                                b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
                leaving.recv(20)
                leaving.close()
            if i % 2:
                answer = server.ask({"prompts": [text], "tokens_to_generate": NEW, "top_k": 1}, "/api", "PUT", connection)
                found[text] = answer["text"][0][len(text):]
            else:
                found[text] = server.ask(greedy(text), connection=connection)["choices"][0]["text"]
        connection.close()
        return found

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        found = {text: written for part in pool.map(talk, range(threads)) for text, written in part.items()}
    assert found == expected


def test_memory_is_steady(server, expected, long_run):
    if not long_run:
        pytest.skip("the long run has it (--long)")
    texts, sizes = list(expected), []

    def talk(number):
        connection = server.connect()
        for text in texts[number::16] * 4:
            server.ask(greedy(text), connection=connection)
        connection.close()

    for _ in range(5):
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(talk, range(16)))
        sizes.append(memory_of(server.process))
    # The heap of so many threads settles slowly; a kilobyte for each request would be 12 MB more.
    assert sizes[-1] < 1.15 * sizes[1], sizes


def test_streams(server, expected):
    for text in list(expected)[:5]:
        connection = server.connect()
        connection.request("POST", "/v1/completions", json.dumps(greedy(text, stream=True, stream_options={"include_usage": True})),
                           {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200 and answer.getheader("Content-Type") == "text/event-stream"
        *pieces, usage = events(answer)
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected[text]
        assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert usage["usage"] == {"prompt_tokens": len(text), "completion_tokens": NEW, "total_tokens": len(text) + NEW}
        assert len(pieces) > 1


def test_streams_that_stop(server, expected):
    """Nothing of a stop text is shown, not even its beginning."""
    text = max(expected, key=lambda text: len(set(expected[text])))
    whole = expected[text]
    stop = next(whole[i:i + 3] for i in range(2, NEW) if whole.find(whole[i:i + 3]) == i and len(whole[i:i + 3].encode()) == 3)
    connection = server.connect()
    connection.request("POST", "/v1/completions", json.dumps(greedy(text, stream=True, stop=["never", stop], logprobs=0)),
                       {"Content-Type": "application/json"})
    pieces = events(connection.getresponse())
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole[:whole.find(stop)]
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop" and pieces[-1]["choices"][0]["logprobs"]["tokens"]


def test_what_completions_may_ask(server, expected):
    one, two = list(expected)[3:5]
    both = server.ask(greedy([one, list(two.encode())], n=2))["choices"]
    assert [choice["text"] for choice in both] == [expected[one]] * 2 + [expected[two]] * 2
    assert [choice["index"] for choice in both] == [0, 1, 2, 3]

    stop = expected[one][4:6]
    cut = server.ask(greedy(one, stop=["never", stop]))
    assert cut["choices"][0]["text"] == expected[one][:expected[one].find(stop)] and cut["choices"][0]["finish_reason"] == "stop"

    scored = server.ask(greedy(one, max_tokens=3, echo=True, logprobs=2))["choices"][0]
    assert scored["text"] == one + expected[one][:len(scored["text"]) - len(one)]
    told = scored["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["top_logprobs"]) == len(one) + 3
    assert told["token_logprobs"][0] is None and told["text_offset"][1] == 1

    drawn = [server.ask({"prompt": one, "seed": 5, "n": 3, "top_p": 0.9})["choices"] for _ in range(2)]
    assert drawn[0] == drawn[1] and len({choice["text"] for choice in drawn[0]}) == 3
    free = [server.ask({"prompt": one})["choices"][0]["text"] for _ in range(2)]
    assert free[0] != free[1]


def test_probabilities(server, model, expected):
    """Those of the model, in torch."""
    reference = transformers.GPT2LMHeadModel.from_pretrained(model).eval()
    text = list(expected)[7]
    told = server.ask({"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 3})["choices"][0]["logprobs"]
    ids = torch.tensor([list(text.encode())])
    with torch.no_grad():
        logprobs = reference(ids).logits[0, :-1].log_softmax(-1)
    assert told["token_logprobs"][1:] == pytest.approx(logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist(), abs=1e-4)
    for own, row in zip(told["top_logprobs"][1:], logprobs):
        assert max(own.values()) == pytest.approx(float(row.max()), abs=1e-4)
    api = server.ask({"prompts": [text], "tokens_to_generate": 2, "top_k": 1, "logprobs": True}, "/api", "PUT")
    assert len(api["segments"][0]) == len(text) + 2 and len(api["logprobs"][0]) == len(text) + 1
    assert api["logprobs"][0][:len(text) - 1] == pytest.approx(told["token_logprobs"][1:], abs=1e-4)


def test_beams_of_the_api(server, expected):
    text = list(expected)[2]
    found = server.ask({"prompts": [text], "tokens_to_generate": 6, "beam_width": 3, "length_penalty": 1.0}, "/api", "PUT")
    assert len(found["text"]) == 3 and found["scores"] == sorted(found["scores"], reverse=True)
    one = server.ask({"prompts": [text], "tokens_to_generate": NEW, "beam_width": 1}, "/api", "PUT")
    assert one["text"] == [text + expected[text]]


BAD = [
    (b"", "empty"), (b"{", "line 1, column 2"), (b'{"prompt": "a",\n "n": }', "line 2, column 7"), (b"[1]", "object"), (b'"a"', "object"),
    (b'{"prompt": "\xff"}', "line 1"), ({}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [["a"]]}, "prompt[0]"),
    ({"prompt": [1, 300]}, "300"), ({"prompt": [-4]}, "-4"), ({"prompt": "a" * 65}, "65"), ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"), ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "top_p": 2}, "top_p"), ({"prompt": "a", "n": 0}, "n "), ({"prompt": "a", "stop": [""]}, "stop"),
    ({"prompt": "a", "stream": 1}, "stream"), ({"prompt": "a", "colour": 1}, "colour"), ({"prompt": "a", "logit_bias": {"3": 1}}, "logit_bias"),
    (b'{"prompt": "a", "n": 1e999}', "number"), (b"[" * 100000, "line 1"), ({"prompt": "a", "presence_penalty": 1}, "presence_penalty"),
    ({"prompt": "a", "max_tokens": 4, "min_tokens": 5}, "min_tokens"),
]
BAD_API = [({"prompts": "a"}, "prompts"), ({"prompts": [1]}, "prompts[0]"), ({"prompts": ["a"], "beam_width": 2, "logprobs": True}, "beam_width"),
           ({"prompts": ["a", "b"], "beam_width": 2}, "beam_width"), ({"sentences": ["a"]}, "prompts"),
           ({"prompts": ["a"], "tokens_to_generate": 0}, "logprobs"), ({"prompts": ["a"], "top_p_decay": 0.5}, "top_p")]


def raw(server, head, body=b"", close=False):
    """All that comes back for these bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        try:
            connection.sendall(head if close else head + b"Connection: close\r\n\r\n" + body)
            if close:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the server has said enough
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionError:
            pass
        return answer


def test_bad_bodies(server, expected):
    """Each is refused by what is wrong with it, on one connection, and a good one behind it is answered."""
    connection, text = server.connect(), list(expected)[0]
    for path, method, cases in (("/v1/completions", "POST", BAD), ("/api", "PUT", BAD_API)):
        for body, words in cases:
            error = server.ask(body, path, method, connection, code=400)["error"]
            assert words in error["message"] and error["type"] == "invalid_request_error", (body, error)
    assert server.ask(greedy(text), connection=connection)["choices"][0]["text"] == expected[text]
    server.ask({"model": "gpt-4", "prompt": "a"}, connection=connection, code=404)
    server.ask(method="GET", path="/nowhere", connection=connection, code=404)
    server.ask(method="GET", path="/v1/completions", connection=connection, code=405)
    server.ask(greedy(text), connection=connection, code=415, headers={"Content-Type": "text/plain"})
    for name in ("evil.example", "127.0.0.1.evil.example"):
        server.ask(greedy(text), connection=connection, code=403, headers={"Host": name})
    assert server.ask(method="GET", path="/health", connection=connection) == {"status": "ok"}
    assert server.ask(method="GET", path="/v1/models", connection=connection)["data"][0]["id"] == "tiny"
    server.ask({"prompt": "a" * 5_000_000}, code=413)
    # The server closes while bytes lie unread, which may take the answer away from the client.
    answer = raw(server, b"\x16\x03\x01 no HTTP\r\n\r\n", close=True)
    assert answer == b"" or b" 400 " in answer
    assert raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nRange: bytes=500-900,-99999\r\n").endswith(b'{"status":"ok"}')
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    assert b" 411 " in raw(server, head)
    bomb = gzip.compress(b" " * 10_000_000)
    assert b" 413 " in raw(server, head + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n" % len(bomb), bomb)
    pieces = (b"%x\r\n" % 2**20 + b" " * 2**20 + b"\r\n") * 5 + b"0\r\n\r\n"
    assert b" 413 " in raw(server, head + b"Transfer-Encoding: chunked\r\n", pieces)
    form = b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\nv\r\n--x--\r\n"
    assert b" 415 " in raw(server, head.replace(b"application/json", b"multipart/form-data; boundary=x") + b"Content-Length: %d\r\n" % len(form),
                           form)
    assert server.ask(greedy(text))["choices"][0]["text"] == expected[text]


def test_a_full_queue_and_the_end(tessera_program, model):
    """What is under way is finished, what is new is refused; who takes too long is told."""
    with Server(tessera_program, model, "--max-queue", 2, "--grace", "0.5") as server:
        server.ask({"prompt": "a", "n": 3}, code=429)
        assert len(server.ask({"prompt": "a", "n": 2})["choices"]) == 2
        assert server.stop(signal.SIGINT) < 5
    with Server(tessera_program, model, "--grace", "200", "--batch-size", 1) as server, concurrent.futures.ThreadPoolExecutor(4) as pool:
        long = {"prompt": "a", "max_tokens": 60, "n": 60, "ignore_eos": True}
        slow = [pool.submit(server.ask, long) for _ in range(4)]
        stream, idle = server.connect(), server.connect()
        stream.request("POST", "/v1/completions", json.dumps({**long, "stream": True}), {"Content-Type": "application/json"})
        pieces = stream.getresponse()
        assert server.ask(method="GET", path="/health", connection=idle)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(OSError):
            server.connect().request("GET", "/health")
        server.ask(long, connection=idle, code=503)
        assert all(len(each.result()["choices"]) == 60 for each in slow)
        assert sum(piece["choices"][0]["finish_reason"] == "length" for piece in events(pieces)) == 60
        server.stop()
    with Server(tessera_program, model, "--grace", "0", "--batch-size", 1) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        slow = pool.submit(server.ask, long, code=500)
        time.sleep(0.2)
        assert server.stop() < 10
        assert "shut down" in slow.result()["error"]["message"]


def test_keys(tessera_program, model, tmp_path):
    (tmp_path / "key").write_text(KEY + "\n")
    (tmp_path / "short").write_text("abc\n")
    assert "chmod 600" in run(tessera_program, "serve", model, "--api_key_file", tmp_path / "key", code=2).stderr
    (tmp_path / "key").chmod(0o600)
    refused = run(tessera_program, "serve", model, "--host", "0.0.0.0", "--port", 0, code=2)
    assert "--api_key_file" in refused.stderr
    assert "16 characters" in run(tessera_program, "serve", model, "--api_key_file", tmp_path / "short", "--allow_secret_mode", code=2).stderr
    with Server(tessera_program, model, "--host", "0.0.0.0", "--api_key_file", tmp_path / "key") as server:
        assert "key" in server.ask({"prompt": "a"}, code=401)["error"]["message"]
        server.ask({"prompt": "a"}, code=401, headers={"Authorization": f"Bearer {KEY}x"})
        server.ask({"prompt": "a"}, code=401, headers={"Authorization": KEY})
        assert server.ask(method="GET", path="/health") == {"status": "ok"}
        assert server.ask({"prompt": "a"}, headers={"Authorization": f"Bearer {KEY}"})["choices"]
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(0.1)
        taken = run(tessera_program, "serve", model, "--tokenizer", "bytes", "--port", server.port, code=3)
        assert f":{server.port}" in taken.stderr
        server.stop()


@pytest.mark.parametrize("layout", ["parallel.tensor=2", "parallel.data=2 parallel.pipeline=2"])
def test_layouts(tessera_program, model, expected, layout):
    """The same texts, drawn ones too, and an end that leaves no rank behind."""
    count = 4 if "pipeline" in layout else 2
    launch = ["launch", "--num_processes", count, "--cpu"] if count == 2 else []  # the other way it starts its processes itself
    texts = list(expected)[:40]
    with Server(tessera_program, model, *layout.split(), launch=launch) as server:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda text: server.ask(greedy(text)), texts))
        assert [answer["choices"][0]["text"] for answer in answers] == [expected[text] for text in texts]
        mixed = [{"prompt": texts[0], "seed": 3, "max_tokens": 8, "logprobs": 2}, {"prompt": texts[1], "seed": 3, "top_k": 5, "n": 2},
                 {"prompt": texts[2], "seed": 4, "top_p": 0.7}, greedy(texts[3], echo=True, logprobs=1)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            here = list(pool.map(server.ask, mixed))
        beams = {"prompts": texts[:1], "tokens_to_generate": 5, "beam_width": 2}
        searched = server.ask(beams, "/api", "PUT")
        with Server(tessera_program, model) as alone:
            for body, answer in zip(mixed, here):
                for own, other in zip(answer["choices"], alone.ask(body)["choices"]):
                    assert own["text"] == other["text"], body
                    if body.get("logprobs"):
                        assert own["logprobs"]["token_logprobs"][1:] == pytest.approx(other["logprobs"]["token_logprobs"][1:], abs=1e-4)
                        assert [set(each or {}) for each in own["logprobs"]["top_logprobs"]] == [
                            set(each or {}) for each in other["logprobs"]["top_logprobs"]]
            assert searched["text"] == alone.ask(beams, "/api", "PUT")["text"]
        time.sleep(1.5)  # with nothing to do ranks wait for each other
        assert server.ask(greedy(texts[5]))["choices"][0]["text"] == expected[texts[5]]
        server.stop()
    assert not os.path.exists(f"/proc/{server.process.pid}")


def test_weights_that_are_damaged(tessera_program, model, tmp_path):
    """Each request is told, and the server goes on."""
    broken = transformers.GPT2LMHeadModel.from_pretrained(model)
    with torch.no_grad():
        broken.transformer.wte.weight[ord("z")] = float("nan")
    broken.save_pretrained(tmp_path / "broken")
    with Server(tessera_program, tmp_path / "broken", "parallel.pipeline=2") as server:
        for _ in range(3):
            assert "not finite" in server.ask({"prompt": "a"}, code=500)["error"]["message"]
            assert "not finite" in server.ask({"prompts": ["a", "b"]}, "/api", "PUT", code=500)["error"]["message"]
        server.stop()


def test_an_encoder_and_a_tokenizer(tessera_program, tmp_path):
    """T5 with a tokenizer of its own process, which Ctrl-C in a terminal reaches too."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{word: i for i, word in enumerate("one two three four five six".split(), start=3)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "t5"
    torch.manual_seed(3)
    transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=9, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, initializer_factor=1.5,
        pad_token_id=0, eos_token_id=1)).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}))
    lines = [{"prompt": text} for text in ("one two", "three", "six five four three two one")]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(tessera_program, "generate", folder, "--temperature", "0", "--max-new-tokens", 6, "--input", tmp_path / "in.jsonl", "--output",
        tmp_path / "out.jsonl", env={"TESSERA_PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "python")})
    expected = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    with Server(tessera_program, folder, "--grace", "200", tokenizer=folder, start_new_session=True) as server:
        for line in expected:
            assert server.ask({"prompt": line["prompt"], "max_tokens": 6, "temperature": 0})["choices"][0]["text"] == line["text"]
            assert server.ask({"prompts": [line["prompt"]], "tokens_to_generate": 6, "top_k": 1}, "/api", "PUT")["text"] == [line["text"]]
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            slow = pool.submit(server.ask, {"prompt": "one", "max_tokens": 500, "n": 100, "ignore_eos": True})
            time.sleep(0.3)
            os.killpg(server.process.pid, signal.SIGINT)
            assert len(slow.result()["choices"]) == 100
        server.process.communicate(timeout=30)
        assert server.process.returncode == 0
