"""`tessera evaluate`: each task on several layouts beside the same task written down here in torch."""

import json
import math
import re

import pytest
from cli_support import run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

POSITIONS = 32
TEXT = ("\n = = The cats ' mat = = \n The cat ( old , a [ dog ] ) ran ; 3 @.@ 5 \u00b0 N @-@ barn : \" no ! \" as ' dogs ' do . It 's"
        " [ ] a { \n mat } ? 1 @,@ 000 ( near \n . \" ran \n") * 2
LINES = ["the cat sat on the mat", "a dog ran to the barn \n", "one two", "we read all of a long line of words that have no end in sight"]
CHOICES = [{"context": "The sky is", "choices": [" blue", " made of old cheese", " red"], "answer": 1},
           {"context": "Two and two", "choices": [" is four", "!"], "answer": 0},
           {"context": "A question that is longer than all the positions there are in it:", "choices": [" a", " bb", " ccc"], "answer": 2}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(7)
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=2, n_embd=24, n_head=4, vocab_size=257, n_positions=POSITIONS, initializer_range=0.3)).eval()
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    return made, folder


def scores(model, tokens):
    """log-probabilities of tokens[1:], and whether each is the likeliest."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).logits[0].double()
    wanted = torch.tensor(tokens[1:])
    return logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0], logits.argmax(-1) == wanted


def asked(model, head, tail):
    head = head[max(0, len(head) + len(tail) - POSITIONS - 1):]
    logprobs, likeliest = scores(model, head + tail)
    return float(logprobs[len(head) - 1:].sum()), bool(likeliest[len(head) - 1:].all())


def perplexity(model, length, step, clean=lambda text: text):
    """Megatron's windows: from the second on the last `step` targets count. Words are those of the text as it was."""
    tokens = list(clean(TEXT).encode())
    targets = len(tokens) - 1
    total = 0.0
    for number in range(max(math.ceil(max(targets - step, 0) / step) + 1, 1)):
        window = tokens[number * step: number * step + length + 1]
        if len(window) < 2:
            continue
        losses = -scores(model, window)[0]
        counted = torch.ones(length)
        if step != length and number > 0:
            counted[:-step] = 0
        total += float((losses * counted[:len(losses)]).sum())
    return {"loss": total / targets, "perplexity": math.exp(total / targets),
            "adjusted_perplexity": math.exp(min(20, total / (len(TEXT.strip().split(" ")) - 1)))}


def detokenized(text):
    """Megatron's rules for WikiText, one after the other."""
    for old, new in (("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" : ", ": "), (" ; ", "; "), (" . ", ". "),
                     (" ! ", "! "), (" ? ", "? "), (" , ", ", ")):
        text = text.replace(old, new)
    for left, right in ("()", "[]", "{}", '""', "''"):
        text = re.sub(rf"{re.escape(left)}\s*([^{re.escape(right)}]*?)\s*{re.escape(right)}",
                      lambda match, a=left, b=right: a + match[1] + b, text)
    for old, new in (("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" \u00b0 ", "\u00b0"), (" \n", "\n"), ("\n ", "\n"),
                     (" N ", " 1 "), (" 's", "'s")):
        text = text.replace(old, new)
    return text


def last_words(model, strict):
    right = 0
    for line in LINES:
        head, word = line.strip().rsplit(None, 1)
        whole = list(f"{head} {word}".encode())
        tail = len(word) + 1 if strict else 1
        right += asked(model, whole[:-tail], whole[-tail:])[1]
    return {"accuracy": right / len(LINES), "correct": right, "examples": len(LINES)}


def choices(model):
    right = [0, 0]
    for question in CHOICES:
        sums = [asked(model, list(question["context"].encode()), list(choice.encode()))[0] for choice in question["choices"]]
        means = [total / len(choice.encode()) for total, choice in zip(sums, question["choices"])]
        for i, values in enumerate((sums, means)):
            right[i] += values.index(max(values)) == question["answer"]
    return {"accuracy": right[0] / len(CHOICES), "accuracy_by_length": right[1] / len(CHOICES), "examples": len(CHOICES)}


def evaluated(program, folder, tmp_path, files, *arguments):
    output = tmp_path / "result.json"
    done = run(program, "evaluate", folder, "--tokenizer", "bytes", "--output", output, *arguments, "--files", *files)
    found = json.loads(output.read_text())
    assert all(f"{name}  " in done.stdout for name in found)
    return found


def close(found, expected):
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("layout", [[], ["parallel.tensor=2", "parallel.sequence=true"], ["parallel.pipeline=2", "parallel.data=2"],
                                    ["parallel.tensor=2", "parallel.pipeline=2"]])
def test_tasks(layout, model, tessera_program, tmp_path):
    made, folder = model
    text, lines, questions = tmp_path / "text.txt", tmp_path / "lines.jsonl", tmp_path / "questions.jsonl"
    text.write_text(TEXT, encoding="utf-8")
    lines.write_text("\n".join(json.dumps({"text": line}) for line in LINES))
    questions.write_text("\n".join(map(json.dumps, CHOICES)) + "\n\n")
    threads = ["--threads", 1]
    close(evaluated(tessera_program, folder, tmp_path, [text], *layout, "--task", "perplexity", "--overlapping-eval", 8, *threads),
          perplexity(made, POSITIONS, 8))
    close(evaluated(tessera_program, folder, tmp_path, [questions], *layout, "--task", "multiple-choice", *threads), choices(made))
    close(evaluated(tessera_program, folder, tmp_path, [lines], *layout, "--task", "cloze", *threads), last_words(made, True))
    if layout:
        return
    close(evaluated(tessera_program, folder, tmp_path, [text], "--task", "perplexity", "--seq-length", 11), perplexity(made, 11, 11))
    assert detokenized(TEXT) != TEXT
    close(evaluated(tessera_program, folder, tmp_path, [text], "--task", "perplexity", "--detokenize-wikitext"),
          perplexity(made, POSITIONS, POSITIONS, detokenized))
    close(evaluated(tessera_program, folder, tmp_path, [lines], "--task", "lambada"), last_words(made, False))
    both = evaluated(tessera_program, folder, tmp_path, [lines, lines], "--task", "lambada", "--strict-lambada")
    assert both["examples"] == 2 * len(LINES) and both["correct"] == 2 * last_words(made, True)["correct"]


def test_answers_can_be_right(tessera_program, tmp_path):
    """A model that repeats its last token knows the last letter of "aaa": accuracies above zero are found as well."""
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=257, n_head=1, vocab_size=257, n_positions=POSITIONS))
    with torch.no_grad():
        for parameter in made.transformer.h.parameters():
            parameter.zero_()
        made.transformer.wpe.weight.zero_()
        made.transformer.wte.weight.copy_(20 * torch.eye(257))
    made.save_pretrained(tmp_path / "model")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "an aaa"}\n{"text": "a cat"}\n')
    found = evaluated(tessera_program, tmp_path / "model", tmp_path, [lines], "--task", "lambada")
    assert found == {"accuracy": 0.5, "correct": 1, "examples": 2}


@pytest.mark.parametrize("arguments, text, said", [
    (["--task", "riddle"], "a b", "riddle"),
    (["--task", "perplexity", "--overlapping-eval", 33], "a b c", "above the 32 tokens of a window"),
    (["--task", "perplexity", "--seq-length", 33], "a b c", "the model has 32 positions"),
    (["--task", "perplexity"], "", "is empty"),
    (["--task", "cloze", "--seq-length", 4], "a b", "are for --task perplexity"),
    (["--task", "cloze", "--detokenize-wikitext"], "a b", "are for --task perplexity"),
    (["--task", "cloze", "--strict-lambada"], "a b", "is for --task lambada"),
    (["--task", "cloze"], '{"text": "a b"}\n{"txt": "a"}', ':2: a line is {"text": "..."}'),
    (["--task", "cloze"], '{"text": "alone"}', "fewer than two words"),
    (["--task", "cloze"], "no json", "a line is a JSON object"),
    (["--task", "multiple-choice"], '{"context": "a", "choices": ["b"], "answer": 0}', "a line is {"),
    (["--task", "multiple-choice"], '{"context": "a", "choices": ["b", "c"], "answer": 2}', "answer 2 of 2 choices, from 0"),
    (["--task", "multiple-choice"], json.dumps({"context": "a", "choices": ["b" * 40, "c"], "answer": 0}), "and the model 32 positions"),
])
def test_what_is_refused(arguments, text, said, model, tessera_program, tmp_path):
    file = tmp_path / "file"
    file.write_text(text)
    code = 4 if arguments[1] in ("cloze", "multiple-choice") and len(arguments) == 2 or text == "" else 2
    assert said in run(tessera_program, "evaluate", model[1], "--tokenizer", "bytes", *arguments, "--files", file, code=code).stderr
